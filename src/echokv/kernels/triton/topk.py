"""Exact top-k by radix select; contract in `kernels/reference/topk.py`.

Scores become unsigned keys of the same order. Four passes fix the k-th key 8 bits at a time: each
counts the digits of the keys that still match, over pieces of a row in parallel, and the next pass
picks the digit. Then a pass counts what each piece contributes and a last one writes it, so
positions come out ascending and ties fall to the lower position. There is no candidate list, and
therefore nothing to overflow.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.reference.topk import check_topk_args, check_topk_rows_args
from echokv.kernels.triton.name_rows import name_rows

_PIECE = 4096  # scores that one program looks at
_DIGITS = 4  # of 8 bits, the highest first
_STATES = _DIGITS + 1  # what is known before each digit, and at the end


def topk(scores: Tensor, context_lens: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of each row of scores [T, W]: [T, k] int32 positions and [T] k-th scores."""
    check_topk_args(scores, context_lens, k)
    rows, width = scores.shape
    device = scores.device
    positions = torch.full((rows, k), -1, dtype=torch.int32, device=device)
    kth = torch.full((rows,), -torch.inf, dtype=torch.float32, device=device)
    if rows == 0 or width == 0:
        return positions, kth
    pieces = triton.cdiv(width, _PIECE)
    histograms = torch.zeros(_DIGITS, rows, 256, dtype=torch.int32, device=device)
    state = torch.empty(_STATES, rows, 2, dtype=torch.int32, device=device)
    counts = torch.empty(rows, pieces, 2, dtype=torch.int32, device=device)
    grid = (pieces, rows)
    for digit in range(_DIGITS):
        _count_digits[grid](
            scores, context_lens, histograms, state, rows, width, k, digit, _PIECE, num_warps=8
        )
    _count_chosen[grid](
        scores, context_lens, histograms, state, counts, rows, width, k, _DIGITS, _PIECE,
        num_warps=8,
    )  # fmt: skip
    _write_chosen[grid](
        scores, context_lens, state, counts, positions, kth, rows, width, k, pieces,
        triton.next_power_of_2(pieces), _DIGITS, _PIECE, num_warps=16,
    )  # fmt: skip
    return positions, kth


def topk_rows(
    scores: Tensor, context_lens: Tensor, k: int, request_rows: Tensor, block_tables: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`topk`, and host slots [T, k] and scores [T, k] of its positions."""
    check_topk_rows_args(scores, context_lens, k, request_rows, block_tables)
    positions, kth = topk(scores, context_lens, k)
    return positions, kth, *name_rows(positions, scores, request_rows, block_tables)


@triton.jit
def _load_keys(scores, row, width, position, valid):
    """uint32 keys in the order of the scores; NaN as -inf, -0.0 as 0.0. All exceed 0."""
    score = tl.load(scores + row * width + position, mask=valid, other=0.0)
    score = tl.where(score == 0.0, 0.0, score)
    score = tl.where(score != score, float("-inf"), score)
    bits = score.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _known(histograms, state, rows, row, k, DIGIT: tl.constexpr):
    """What is known before digit DIGIT, from the state and histogram before.

    The k-th key's upper digits, and how many of the keys that share them are among the k best.
    """
    if DIGIT == 0:
        prefix = tl.full((), 0, tl.uint32)
        wanted = tl.full((), 0, tl.int32) + k
    else:
        before = state + ((DIGIT - 1) * rows + row) * 2
        prefix = tl.load(before).to(tl.uint32, bitcast=True)
        wanted = tl.load(before + 1)
        value = tl.arange(0, 256)
        count = tl.load(histograms + ((DIGIT - 1) * rows + row) * 256 + value)
        at_least = tl.cumsum(count, axis=0, reverse=True)  # keys whose digit is value or more
        digit = tl.max(tl.where(at_least >= wanted, value, 0), axis=0)
        above = tl.sum(tl.where(value > digit, count, 0), axis=0)
        prefix = (prefix << 8) | digit.to(tl.uint32)
        wanted = wanted - above
    return prefix, wanted


@triton.jit
def _count_digits(
    scores,  # [T, width]
    context_lens,  # [T]
    histograms,  # [4, T, 256] int32, zero at first
    state,  # [5, T, 2] int32: prefix, wanted
    rows,
    width,
    k,
    DIGIT: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Program (piece, row): add the piece's digits to the row's histogram."""
    row = tl.program_id(1).to(tl.int64)
    length = tl.minimum(tl.load(context_lens + row), width)
    start = tl.program_id(0) * PIECE
    if (length >= k) & (start < length):
        prefix, wanted = _known(histograms, state, rows, row, k, DIGIT)
        if start == 0:
            tl.store(state + (DIGIT * rows + row) * 2, prefix.to(tl.int32, bitcast=True))
            tl.store(state + (DIGIT * rows + row) * 2 + 1, wanted)
        position = start + tl.arange(0, PIECE)
        valid = position < length
        key = _load_keys(scores, row, width, position, valid)
        if DIGIT > 0:
            valid = valid & (key >> (32 - 8 * DIGIT) == prefix)
        digit = ((key >> (24 - 8 * DIGIT)) & 0xFF).to(tl.int32)
        count = tl.histogram(digit, 256, mask=valid)
        target = histograms + (DIGIT * rows + row) * 256 + tl.arange(0, 256)
        tl.atomic_add(target, count, mask=count > 0, sem="relaxed")


@triton.jit
def _count_chosen(
    scores,  # [T, width]
    context_lens,  # [T]
    histograms,  # [4, T, 256]
    state,  # [5, T, 2]
    counts,  # [T, pieces, 2] int32 out: above the k-th key, equal to it
    rows,
    width,
    k,
    DIGITS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Program (piece, row). A row shorter than k has key 0, which every score exceeds."""
    row = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(0)
    length = tl.minimum(tl.load(context_lens + row), width)
    start = piece * PIECE
    threshold = tl.full((), 0, tl.uint32)
    wanted = tl.full((), 0, tl.int32)
    if length >= k:
        threshold, wanted = _known(histograms, state, rows, row, k, DIGITS)
    if piece == 0:
        tl.store(state + (DIGITS * rows + row) * 2, threshold.to(tl.int32, bitcast=True))
        tl.store(state + (DIGITS * rows + row) * 2 + 1, wanted)
    position = start + tl.arange(0, PIECE)
    valid = position < length
    key = _load_keys(scores, row, width, position, valid)
    above = tl.sum((valid & (key > threshold)).to(tl.int32), axis=0)
    equal = tl.sum((valid & (key == threshold)).to(tl.int32), axis=0)
    target = counts + (row * tl.num_programs(0) + piece) * 2
    tl.store(target, above)
    tl.store(target + 1, equal)


@triton.jit
def _write_chosen(
    scores,  # [T, width]
    context_lens,  # [T]
    state,  # [5, T, 2]
    counts,  # [T, pieces, 2]
    positions,  # [T, k] int32 out, -1 at first
    kth,  # [T] float32 out, -inf at first
    rows,
    width,
    k,
    pieces,
    BLOCK_PIECES: tl.constexpr,
    DIGITS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Program (piece, row): write the piece's chosen positions after those of earlier pieces."""
    row = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(0)
    length = tl.minimum(tl.load(context_lens + row), width)
    start = piece * PIECE
    if start < length:
        threshold = tl.load(state + (DIGITS * rows + row) * 2).to(tl.uint32, bitcast=True)
        wanted = tl.load(state + (DIGITS * rows + row) * 2 + 1)
        other = tl.arange(0, BLOCK_PIECES)
        earlier = other < piece
        at = counts + (row * pieces + other) * 2
        above_before = tl.sum(tl.load(at, mask=earlier, other=0), axis=0)
        equal_before = tl.sum(tl.load(at + 1, mask=earlier, other=0), axis=0)
        position = start + tl.arange(0, PIECE)
        valid = position < length
        key = _load_keys(scores, row, width, position, valid)
        equal = (valid & (key == threshold)).to(tl.int32)
        rank = equal_before + tl.cumsum(equal, axis=0) - equal  # among the row's ties
        chosen = (valid & (key > threshold)) | ((equal != 0) & (rank < wanted))
        taken = chosen.to(tl.int32)
        place = above_before + tl.minimum(equal_before, wanted) + tl.cumsum(taken, axis=0) - taken
        tl.store(positions + row * k + place, position, mask=chosen)
        if (piece == 0) & (length >= k):
            bits = tl.where(threshold >> 31 != 0, threshold & 0x7FFFFFFF, threshold ^ 0xFFFFFFFF)
            tl.store(kth + row, bits.to(tl.float32, bitcast=True))


_INPUTS = {"scores": "*fp32", "context_lens": "*i32"}
_SIZES = {"rows": "i32", "width": "i32:16", "k": "i32:16"}
_WARPS = {"num_warps": 8}
COMPILE_SIGNATURES = (
    *(
        (
            _count_digits,
            {**_INPUTS, "histograms": "*i32", "state": "*i32", **_SIZES, "DIGIT": digit,
             "PIECE": _PIECE},
            _WARPS,
        )
        for digit in range(_DIGITS)
    ),
    (
        _count_chosen,
        {**_INPUTS, "histograms": "*i32", "state": "*i32", "counts": "*i32", **_SIZES,
         "DIGITS": _DIGITS, "PIECE": _PIECE},
        _WARPS,
    ),
    (
        _write_chosen,
        {**_INPUTS, "state": "*i32", "counts": "*i32", "positions": "*i32", "kth": "*fp32",
         **_SIZES, "pieces": "i32", "BLOCK_PIECES": 256, "DIGITS": _DIGITS, "PIECE": _PIECE},
        {"num_warps": 16},
    ),
)  # fmt: skip
