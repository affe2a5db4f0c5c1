"""Made-up traces, small and hostile: shared blocks, short selections, equal scores."""

import numpy as np

from echokv.bench.trace_format import CODE_BINS, Trace
from echokv.memory.slots import BLOCK_TOKENS


def made_up_trace(
    seed: int, *, topk: int = 8, steps: int = 30, layers: int = 2, hot: float = 0.7
) -> Trace:
    """Three sequences that decode together; the first two share a block, the last ends early.

    Selections keep `hot` of the previous ones, so that policies have something to find.
    """
    rng = np.random.default_rng(seed)
    starts = [BLOCK_TOKENS + 3, BLOCK_TOKENS + 20, 5]
    blocks = [[4, 2], [4, 0], [3]]
    ends = [steps, steps, steps // 2]
    rows, sizes = [], []
    for step in range(steps):
        here = [(q, starts[q] + step) for q in range(3) if step < ends[q]]
        rows += here
        sizes.append(len(here))
    chosen = np.full((layers, len(rows), topk), -1, np.int32)
    for layer in range(layers):
        previous: dict[int, np.ndarray] = {}
        for row, (sequence, position) in enumerate(rows):
            want = min(topk, position + 1)
            kept = previous.get(sequence, np.zeros(0, np.int32))
            kept = kept[rng.random(kept.size) < hot]
            fresh = np.setdiff1d(rng.permutation(position + 1)[: 2 * topk], kept)
            picked = np.concatenate([kept, rng.permutation(fresh)])[:want]
            chosen[layer, row, : picked.size] = np.sort(picked)
            previous[sequence] = np.sort(picked)
    codes = rng.integers(0, CODE_BINS + 2, chosen.shape).astype(np.uint8)
    codes[chosen < 0] = 0
    pairs = np.array(rows, np.int32)
    return Trace(
        meta={"topk": topk, "layers": list(range(layers)), "kth_ranks": [1, topk, 4 * topk]},
        sequence_prompt_lens=np.array(starts, np.int32),
        sequence_offsets=np.array([0, 2, 4, 5], np.int32),
        sequence_blocks=np.concatenate([np.array(b, np.int32) for b in blocks]),
        pass_offsets=np.cumsum([0, *sizes]).astype(np.int32),
        row_sequence=pairs[:, 0].copy(),
        row_position=pairs[:, 1].copy(),
        row_selected=np.ones(len(rows), np.bool_),
        release_pass=np.array([steps // 2], np.int32),
        release_block=np.array([3], np.int32),
        positions=chosen,
        score_codes=codes,
        kth_scores=rng.normal(size=chosen.shape[:2]).astype(np.float32),
        rank_scores=-np.sort(rng.normal(size=(*chosen.shape[:2], 3)), axis=2)[:, :, ::1].astype(
            np.float32
        ),
    )
