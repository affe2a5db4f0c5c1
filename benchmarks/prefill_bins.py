"""How many of prefill's scores share the bin in which the k-th falls, shifted and not.

    python benchmarks/prefill_bins.py --out benchmarks/results/prefill-bins.json   # minutes of CPU

The demo model reads a text in chunks. Whatever lies above the bin of the k-th score is surely
selected and may move early; what is in it may or may not be. As in the product, scores are shifted
by the average of the k-th scores of the request's last token in the chunks before (ECHO paper,
section 5.2, figure 9), which is why the first chunk has no shift. Rows of all layers together.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echokv.bench.around_indexer import AroundIndexer
from echokv.bench.filler import filler_lines
from echokv.bench.report import environment, write_json
from echokv.cache.batch import ForwardBatch
from echokv.config import EngineConfig
from echokv.engine.build import EngineHooks
from echokv.engine.engine import Engine
from echokv.engine.offline import drive
from echokv.engine.sampling_params import SamplingParams
from echokv.indexer.indexer import Indexer, Selection
from echokv.kernels.prefetch_args import EMA_ALPHA
from echokv.kernels.reference.score_bounds import BINS, order_keys

CHUNK = 1024
EVERY = 4  # of the tiles that the reference backend cuts chunks into, how many are looked at: one
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class BinSelector(AroundIndexer):
    """The product's indexer; of prefill, the sizes of the k-th scores' bins beside."""

    def __init__(self, exact: Indexer) -> None:
        super().__init__(exact)
        self.sizes: dict[tuple[int, str], list[Tensor]] = {}  # by a chunk's first token, and how
        self._indexer = exact
        self._shifts: dict[int, float] = {}  # of each layer

    def select(
        self, index_layer: int, query: Tensor, weights: Tensor, batch: ForwardBatch
    ) -> Selection:
        """See `Indexer`."""
        selection = self._exact.select(index_layer, query, weights, batch)
        first, rows = int(batch.positions[0]), batch.num_real_tokens
        chunk, last = first // CHUNK * CHUNK, first + rows - 1
        if chunk > 0 and first // rows % EVERY == 0:
            every = self._indexer.with_topk(batch.max_context_len)
            scores = every.select(index_layer, query, weights, batch).scores[:rows]
            for how, shift in (("plain", 0.0), ("shifted", self._shifts[index_layer])):
                sizes = bin_sizes(scores, shift, self.topk)
                self.sizes.setdefault((chunk, how), []).append(sizes)
        if last % CHUNK == CHUNK - 1:
            kth = float(selection.kth_scores[rows - 1])
            past = self._shifts.get(index_layer, kth)
            self._shifts[index_layer] = EMA_ALPHA * past + (1 - EMA_ALPHA) * kth
        return selection


def bin_sizes(scores: Tensor, shift: float, k: int) -> Tensor:
    """[T] int64: scores in the bin of each row's k-th highest, as `score_bounds` has bins.

    Args:
        scores: [T, W] float32, -inf past the contexts.
        shift: what is subtracted.
        k: entries of a selection.
    """
    keys = order_keys(scores - shift) >> 24
    counts = torch.zeros((scores.shape[0], BINS), dtype=torch.int64)
    counts.scatter_add_(1, keys, scores.isfinite().long())
    kth = keys.gather(1, scores.topk(k, dim=1).indices[:, -1:])
    return counts.gather(1, kth)[:, 0]


def measure(model: str, tokens: int) -> dict[str, Any]:
    """Read a text of so many tokens, and say how the sizes spread, chunk by chunk."""
    found: list[BinSelector] = []

    def wrap(_model: object, exact: Indexer) -> BinSelector:
        found.append(BinSelector(exact))
        return found[0]

    config = EngineConfig(
        model=model, max_num_seqs=1, max_model_len=tokens + 64, max_num_batched_tokens=CHUNK,
        device_pool_tokens=tokens + 64, enforce_eager=True,
    )  # fmt: skip
    engine = Engine(config, hooks=EngineHooks(selector=wrap))
    prompt = engine.tokenizer.encode("".join(filler_lines("held-out")[: tokens // 4]))[:tokens]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for _ in drive(engine, [(prompt, params)], name="bins"):
        pass
    engine.close()
    chunks: dict[int, dict[str, Any]] = {}
    for (first, how), sizes in found[0].sizes.items():
        spread = np.quantile(torch.cat(sizes).numpy(), QUANTILES)
        chunks.setdefault(first, {"first": first, "tokens": CHUNK})[how] = spread.tolist()
    return {
        "k": found[0].topk, "quantiles": list(QUANTILES), "prompt_tokens": len(prompt),
        "chunks": list(chunks.values()),
    }  # fmt: skip


def main() -> None:
    """Parse flags, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--model", default="examples/demo_model/checkpoint", help="checkpoint")
    parser.add_argument("--tokens", type=int, default=8 * CHUNK, help="of the text")
    args = parser.parse_args()
    result = {"environment": environment()} | measure(args.model, args.tokens)
    for chunk in result["chunks"]:
        print(chunk["first"], *(f"{how} {chunk[how]}" for how in ("plain", "shifted")))
    write_json(args.out, result)


if __name__ == "__main__":
    main()
