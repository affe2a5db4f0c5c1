"""A mixture of fp8 experts; contract in `kernels/reference/fp8_experts.py`.

(token, choice) pairs are sorted by expert into blocks of one expert each. How many blocks there
are follows from the numbers of pairs and experts alone, so that nothing waits for the device;
blocks that turn out not to be needed end at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.reference.fp8_experts import check_experts_args
from echokv.kernels.triton.fp8_product import (
    MANY_ROWS,
    MANY_ROWS_GATED,
    Groups,
    Tiles,
    product,
)

_CHUNK = 1024  # pairs looked at together
_COMBINE_COLUMNS = 1024


def fp8_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
) -> Tensor:
    """Weighted sum of the chosen experts' gated MLPs over x [T, H]: [T, H] float32."""
    check_experts_args(x, experts, weights, gate_up, gate_up_scale, down, down_scale)
    if x.shape[0] == 0:
        return x.new_empty(x.shape, dtype=torch.float32)
    first, second = expert_tiles(experts.numel(), down.shape[0])
    groups = group_by_expert(experts, down.shape[0], first.rows)
    choices = experts.shape[1]
    inner = product(
        x, gate_up, gate_up_scale, first, gated=True, groups=groups, fan_out=choices
    )  # [T * k, I]
    outputs = product(inner, down, down_scale, second, groups=groups)  # [T * k, H]
    return combine(outputs, weights)


def expert_tiles(pairs: int, experts: int) -> tuple[Tiles, Tiles]:
    """Tiles of the two products, with the same number of rows."""
    if pairs > 64 * experts:
        return MANY_ROWS_GATED, MANY_ROWS
    rows = 16 if pairs <= 16 * experts else 64
    tiles = Tiles(rows=rows, columns=64, swapped=True, quantised=rows > 16)
    return tiles, tiles


def group_by_expert(experts: Tensor, num_experts: int, rows: int) -> Groups:
    """Sort pairs by expert, each expert's padded to blocks of `rows`, in the order of the tokens.

    Args:
        experts: [T, k] int64.
        num_experts: E.
        rows: pairs a block.
    """
    pairs = experts.numel()
    most = (pairs + min(pairs, num_experts) * (rows - 1)) // rows
    blocks = min(pairs, most)
    groups = Groups(
        pairs=torch.empty(blocks * rows, dtype=torch.int32, device=experts.device),
        experts=torch.empty(blocks, dtype=torch.int32, device=experts.device),
        places=torch.empty(pairs, dtype=torch.int32, device=experts.device),
    )
    _group_by_expert[(num_experts,)](
        experts,
        groups.pairs,
        groups.experts,
        groups.places,
        pairs,
        blocks,
        num_experts,
        triton.next_power_of_2(num_experts),
        rows,
        min(_CHUNK, max(16, triton.next_power_of_2(pairs))),
    )
    return groups


def combine(outputs: Tensor, weights: Tensor, places: Tensor | None = None) -> Tensor:
    """Expert outputs times weights, summed in the order of each token's choices.

    Args:
        outputs: [R, H], pair (t, i) in row t * k + i.
        weights: [T, k] float32.
        places: [T * k] int32 rows of the pairs, where they lie otherwise.

    Returns:
        [T, H] float32.
    """
    tokens, choices = weights.shape
    columns = outputs.shape[-1]
    total = torch.empty(tokens, columns, dtype=torch.float32, device=outputs.device)
    _combine[(tokens, triton.cdiv(columns, _COMBINE_COLUMNS))](
        outputs,
        weights,
        total,
        weights if places is None else places,
        columns,
        choices,
        places is not None,
        _COMBINE_COLUMNS,
    )
    return total


@triton.jit
def _group_by_expert(
    experts,  # [pairs] int64
    grouped,  # [blocks * ROWS] int32 out
    block_experts,  # [blocks] int32 out
    places,  # [pairs] int32 out: where in `grouped` each pair is
    pairs,
    blocks,
    num_experts,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (expert): counts everybody's pairs to know where its own blocks begin."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    lane = tl.arange(0, CHUNK)
    counts = tl.zeros((BINS,), tl.int32)
    start = 0
    while start < pairs:
        inside = start + lane < pairs
        chosen = tl.load(experts + start + lane, mask=inside, other=0).to(tl.int32)
        counts += tl.histogram(chosen, BINS, mask=inside)
        start += CHUNK
    needed = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(bins < expert, needed, 0))
    count = tl.sum(tl.where(bins == expert, counts, 0))
    own = (count + ROWS - 1) // ROWS
    before = 0
    start = 0
    while start < pairs:
        inside = start + lane < pairs
        chosen = tl.load(experts + start + lane, mask=inside, other=-1).to(tl.int32)
        mine = (chosen == expert).to(tl.int32)
        place = first * ROWS + before + tl.cumsum(mine, axis=0) - mine
        tl.store(grouped + place, start + lane, mask=mine != 0)
        tl.store(places + start + lane, place, mask=mine != 0)
        before += tl.sum(mine)
        start += CHUNK
    pad = count + tl.arange(0, ROWS)
    tl.store(grouped + first * ROWS + pad, tl.zeros_like(pad) + pairs, mask=pad < own * ROWS)
    start = 0
    while start < own:
        block = start + lane
        tl.store(block_experts + first + block, tl.zeros_like(block) + expert, mask=block < own)
        start += CHUNK
    if expert == num_experts - 1:
        start = first + own
        while start < blocks:
            block = start + lane
            tl.store(block_experts + block, tl.full((CHUNK,), -1, tl.int32), mask=block < blocks)
            start += CHUNK


@triton.jit
def _combine(
    outputs,  # [R, columns]
    weights,  # [T, k] fp32
    total,  # [T, columns] fp32 out
    places,  # [T * k] where PLACED
    columns,
    CHOICES: tl.constexpr,
    PLACED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (token, block of columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    acc = tl.zeros((COLUMNS,), tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        row = pair
        if PLACED:
            row = tl.load(places + pair).to(tl.int64)
        part = tl.load(outputs + row * columns + column, mask=inside, other=0.0)
        acc += tl.load(weights + pair) * part.to(tl.float32)
    tl.store(total + token * columns + column, acc, mask=inside)


COMPILE_SIGNATURES = (
    (
        _group_by_expert,
        {
            "experts": "*i64",
            "grouped": "*i32",
            "block_experts": "*i32",
            "places": "*i32",
            **dict.fromkeys(("pairs", "blocks", "num_experts"), "i32"),
            "BINS": 256,
            "ROWS": 16,
            "CHUNK": _CHUNK,
        },
    ),
    (
        _combine,
        {
            "outputs": "*bf16",
            "weights": "*fp32",
            "total": "*fp32",
            "places": "*i32",
            "columns": "i32:16",
            "CHOICES": 8,
            "PLACED": True,
            "COLUMNS": _COMBINE_COLUMNS,
        },
    ),
)
