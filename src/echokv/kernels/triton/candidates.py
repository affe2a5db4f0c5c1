"""Rows worth fetching before the top-k is known; contract in `kernels/reference/candidates.py`.

One kernel counts what each piece of a row would contribute, the next writes it after what earlier
pieces have: ascending positions, whatever runs first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.prefetch_args import BUDGET_UNIT, check_candidates_args
from echokv.memory.slots import BLOCK_TOKENS

_PIECE = 2048  # scores that one program looks at


@triton.jit
def _find(
    scores,
    context_lens,
    block_tables,
    request_rows,
    request_slots,
    thresholds,
    host_to_device,
    row,
    start,
    width,
    num_blocks,
    PIECE: tl.constexpr,
    PAGE: tl.constexpr,
):
    """The piece's host slots and scores, and which of them are candidates."""
    slot = tl.load(request_slots + row)
    threshold = tl.load(thresholds + slot, mask=slot >= 0, other=float("inf"))
    length = tl.minimum(tl.load(context_lens + row), width)
    length = tl.where(threshold < float("inf"), length, 0)  # no NaN passes
    position = start + tl.arange(0, PIECE)
    inside = position < length
    score = tl.load(scores + row * width + position, mask=inside, other=0.0)
    beats = inside & (score >= threshold)
    table = block_tables + tl.load(request_rows + row).to(tl.int64) * num_blocks
    block = tl.load(table + position // PAGE, mask=beats, other=0)
    host_slot = block * PAGE + position % PAGE
    device_slot = tl.load(host_to_device + host_slot.to(tl.int64), mask=beats, other=0)
    return host_slot, score, beats & (device_slot < 0)


@triton.jit
def _count_candidates(
    scores,  # [T, width]
    context_lens,  # [T]
    block_tables,  # [R, num_blocks]
    request_rows,  # [T]
    request_slots,  # [T]
    thresholds,  # [S]
    host_to_device,  # [N_H]
    counts,  # [T, pieces] out
    width,
    num_blocks,
    PIECE: tl.constexpr,
    PAGE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(0)
    _, _, chosen = _find(
        scores, context_lens, block_tables, request_rows, request_slots, thresholds,
        host_to_device, row, piece * PIECE, width, num_blocks, PIECE, PAGE,
    )  # fmt: skip
    tl.store(counts + row * tl.num_programs(0) + piece, tl.sum(chosen.to(tl.int32)))


@triton.jit
def _write_candidates(
    scores,
    context_lens,
    block_tables,
    request_rows,
    request_slots,
    thresholds,
    limits,  # [S]
    host_to_device,
    counts,  # [T, pieces]
    host_slots,  # [T, most] out
    found,  # [T, most] out: scores
    num_found,  # [T] out
    width,
    num_blocks,
    pieces,
    most,
    rows_per_unit,
    least,
    UNIT: tl.constexpr,
    PIECES: tl.constexpr,
    MOST: tl.constexpr,
    PIECE: tl.constexpr,
    PAGE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(0)
    other = tl.arange(0, PIECES)
    count = tl.load(counts + row * pieces + other, mask=other < pieces, other=0)
    before = tl.sum(tl.where(other < piece, count, 0))
    mine = tl.sum(tl.where(other == piece, count, 0))
    length = tl.minimum(tl.load(context_lens + row), width).to(tl.int64)
    slot = tl.load(request_slots + row)
    limit = tl.maximum(tl.load(limits + slot, mask=slot >= 0, other=0), 0)
    budget = tl.minimum(least + length * rows_per_unit // UNIT, most)
    budget = tl.minimum(budget, limit).to(tl.int32)
    if piece == 0:
        total = tl.minimum(tl.sum(count), budget)
        tl.store(num_found + row, total)
        column = tl.arange(0, MOST)
        empty = (column >= total) & (column < most)
        tl.store(host_slots + row * most + column, tl.full([MOST], -1, tl.int32), mask=empty)
        nothing = tl.full([MOST], float("-inf"), tl.float32)
        tl.store(found + row * most + column, nothing, mask=empty)
    if (mine > 0) & (before < budget):
        host_slot, score, chosen = _find(
            scores, context_lens, block_tables, request_rows, request_slots, thresholds,
            host_to_device, row, piece * PIECE, width, num_blocks, PIECE, PAGE,
        )  # fmt: skip
        taken = chosen.to(tl.int32)
        place = before + tl.cumsum(taken, axis=0) - taken
        kept = chosen & (place < budget)
        tl.store(host_slots + row * most + place, host_slot, mask=kept)
        tl.store(found + row * most + place, score, mask=kept)


def prefetch_candidates(
    scores: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    request_rows: Tensor,
    request_slots: Tensor,
    thresholds: Tensor,
    limits: Tensor,
    host_to_device: Tensor,
    *,
    most: int,
    rows_per_unit: int,
    least: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Absent rows that beat the prediction; see `reference.prefetch_candidates`."""
    check_candidates_args(
        scores, context_lens, block_tables, request_rows, request_slots, thresholds, limits,
        host_to_device, most,
    )  # fmt: skip
    (rows, width), device = scores.shape, scores.device
    host_slots = torch.empty((rows, most), dtype=torch.int32, device=device)
    found = torch.empty((rows, most), dtype=torch.float32, device=device)
    num_found = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0:
        return host_slots, found, num_found
    pieces = max(1, triton.cdiv(width, _PIECE))
    counts = torch.empty((rows, pieces), dtype=torch.int32, device=device)
    num_blocks = block_tables.shape[1]
    _count_candidates[(pieces, rows)](
        scores, context_lens, block_tables, request_rows, request_slots, thresholds,
        host_to_device, counts, width, num_blocks, PIECE=_PIECE, PAGE=BLOCK_TOKENS, num_warps=8,
    )  # fmt: skip
    _write_candidates[(pieces, rows)](
        scores, context_lens, block_tables, request_rows, request_slots, thresholds, limits,
        host_to_device, counts, host_slots, found, num_found, width, num_blocks, pieces, most,
        rows_per_unit, least, UNIT=BUDGET_UNIT, PIECES=triton.next_power_of_2(pieces),
        MOST=triton.next_power_of_2(most), PIECE=_PIECE, PAGE=BLOCK_TOKENS, num_warps=8,
    )  # fmt: skip
    return host_slots, found, num_found


_INTS = "*i32"
_INPUTS = {
    "scores": "*fp32",
    **dict.fromkeys(("context_lens", "block_tables", "request_rows", "request_slots"), _INTS),
    "thresholds": "*fp32",
}
_SIZES = {"width": "i32:16", "num_blocks": "i32"}
_CUT = {"PIECE": _PIECE, "PAGE": BLOCK_TOKENS}
_WARPS = {"num_warps": 8}
COMPILE_SIGNATURES = (
    (
        _count_candidates,
        {**_INPUTS, "host_to_device": _INTS, "counts": _INTS, **_SIZES, **_CUT},
        _WARPS,
    ),
    (
        _write_candidates,
        {
            **_INPUTS,
            **dict.fromkeys(("limits", "host_to_device", "counts", "host_slots"), _INTS),
            "found": "*fp32",
            "num_found": _INTS,
            **_SIZES,
            **dict.fromkeys(("pieces", "most", "rows_per_unit", "least"), "i32"),
            "UNIT": BUDGET_UNIT,
            "PIECES": 64,
            "MOST": 512,
            **_CUT,
        },
        _WARPS,
    ),
)
