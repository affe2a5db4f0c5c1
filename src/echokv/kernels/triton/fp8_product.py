"""One kernel for every product with block-quantised fp8 weights: plain, gated, grouped by expert.

Weights stream through shared memory in blocks of 128 columns, each block's product scaled in fp32.
A few rows are quantised by every program for itself, which costs no launch; many are quantised
once before. Where a weight has too few rows to occupy the GPU, its columns are split, and a second
kernel adds the parts in order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.reference.fp8_linear import FP8_BLOCK, FP8_MAX, SMALLEST_AMAX
from echokv.kernels.triton.numerics import INTERPRETED, round_to, to_float8e4m3


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a product is cut up."""

    rows: int  # of x
    columns: int  # of the output; at most FP8_BLOCK, which they divide
    splits: int = 1  # of the sum; they divide its blocks of 128
    swapped: bool = False  # the weight is the left operand: 64 of its rows are one instruction's
    quantised: bool = False  # x is quantised by a kernel before
    warps: int = 4
    stages: int = 4


MANY_ROWS = Tiles(rows=128, columns=128, quantised=True, warps=8, stages=3)
MANY_ROWS_GATED = Tiles(rows=128, columns=64, quantised=True, warps=8, stages=3)
"""For prefill: large enough that the tensor cores, not memory, set the pace."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Rows sorted by expert, in blocks of one expert each (`group_by_expert`)."""

    pairs: Tensor  # [blocks * rows of a tile] int32: row of the output; past the last for padding
    experts: Tensor  # [blocks] int32; -1 for a block that is not needed
    places: Tensor  # [R] int32: where in `pairs` each row is


def product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    tiles: Tiles,
    *,
    gated: bool = False,
    groups: Groups | None = None,
    fan_out: int = 1,
) -> Tensor:
    """x [R, K] times weight [N, K] (or [E, N, K] with groups), as bfloat16.

    Args:
        x: bfloat16.
        weight: float8_e4m3fn.
        scale: float32, one for each block of 128 x 128 of the weight.
        tiles: how to cut.
        gated: the weight is gate and up; the result is silu(gate) * up, [R, N / 2].
        groups: which expert's weight each row of the output takes.
        fan_out: output rows that one row of x has (row r of the output reads row r // fan_out).
    """
    columns, width = weight.shape[-2] // (2 if gated else 1), weight.shape[-1]
    rows, splits = x.shape[0] * fan_out, tiles.splits
    steps = width // FP8_BLOCK // splits
    assert steps * splits * FP8_BLOCK == width, "splits must divide the blocks of columns"
    blocks = triton.cdiv(rows, tiles.rows) if groups is None else groups.experts.shape[0]
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=x.device)
    values, x_scales = quantise(x) if tiles.quantised else (x, x)
    target, target_columns, gate_at_once = out, columns, gated
    if splits > 1:  # silu needs whole sums: gate and up are then two halves of the columns
        target_columns, gate_at_once = weight.shape[-2], False
        target = out.new_empty(splits, rows, target_columns, dtype=torch.float32)
    pairs, experts = (out, out) if groups is None else (groups.pairs, groups.experts)
    _fp8_product[(triton.cdiv(target_columns, tiles.columns), blocks, splits)](
        values,
        x_scales,
        weight,
        scale,
        target,
        pairs,
        experts,
        rows,
        target_columns,
        width,
        scale.shape[-2],
        x_scales.stride(1),
        fan_out,
        steps,
        steps if INTERPRETED else 0,
        FP8_BLOCK,
        tiles.rows,
        tiles.columns,
        splits,
        groups is not None,
        gate_at_once,
        tiles.quantised,
        tiles.swapped,
        FP8_MAX,
        SMALLEST_AMAX,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        grid = (triton.cdiv(rows * columns, _SUM_BLOCK),)
        _sum_splits[grid](target, out, rows, columns, splits, gated, _SUM_BLOCK)
    return out


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [R, K] bfloat16 by groups of 128 columns.

    Returns:
        [R, K] e4m3, and [R, K / 128] float32 scales that lie column by column, each padded to a
        multiple of 4 (which is how DeepGEMM wants them).
    """
    rows, width = x.shape
    values = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    stride = triton.cdiv(rows, 4) * 4
    scales = torch.empty(width // FP8_BLOCK, stride, dtype=torch.float32, device=x.device)
    if rows:
        grid = (triton.cdiv(rows, _QUANTISE_ROWS), width // FP8_BLOCK)
        _quantise[grid](
            x, values, scales, rows, width, stride, FP8_BLOCK, _QUANTISE_ROWS, FP8_MAX,
            SMALLEST_AMAX,
        )  # fmt: skip
    return values, scales.t()[:rows]


_SUM_BLOCK = 1024
_QUANTISE_ROWS = 16


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _dot(a, b):
    """e4m3 a @ b over one block of 128: the tensor core's own sums, which keep 14 bits or so."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def in_e4m3(x, FP8_LIMIT: tl.constexpr, SMALLEST: tl.constexpr):
    """[R, 128] -> its e4m3 codes and [R] scales, as `reference.quantise_activations`."""
    x = x.to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), SMALLEST)
    limit = tl.full(amax.shape, FP8_LIMIT, tl.float32)
    return to_float8e4m3(x * tl.div_rn(limit, amax)[:, None]), tl.div_rn(amax, limit)


@triton.jit
def _quantise(
    x,  # [R, K]
    values,  # [R, K] e4m3 out
    scales,  # [K / BLOCK, stride] fp32 out
    rows,
    width,
    stride,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    FP8_LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """Program (rows, block of columns)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    valid = row < rows
    codes, scale = in_e4m3(tl.load(x + at, mask=valid[:, None], other=0.0), FP8_LIMIT, SMALLEST)
    tl.store(values + at, codes, mask=valid[:, None])
    tl.store(scales + block.to(tl.int64) * stride + row, scale, mask=valid)


@triton.jit
def _fp8_product(
    x,  # [R / fan_out, K] bf16, or e4m3 where QUANTISED
    x_scales,  # [K / BLOCK, scale_stride] fp32 where QUANTISED
    weight,  # [E, N, K] e4m3
    scales,  # [E, scale_rows, K / BLOCK] fp32
    out,  # [R, columns]; [SPLITS, R, columns] fp32 where SPLITS > 1
    pairs,  # see Groups
    experts,
    rows,  # R
    columns,  # N, or N / 2 where GATED
    width,  # K
    scale_rows,
    scale_stride,
    fan_out,
    steps,  # blocks of K a split
    STEPS: tl.constexpr,  # the same under the interpreter, else 0
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUPED: tl.constexpr,
    GATED: tl.constexpr,
    QUANTISED: tl.constexpr,
    SWAPPED: tl.constexpr,
    FP8_LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """Program (block of output columns, block of rows, split of the sum)."""
    block = tl.program_id(1)
    row = block * ROWS + tl.arange(0, ROWS)
    expert = tl.full((), 0, tl.int64)
    if GROUPED:
        expert = tl.load(experts + block).to(tl.int64)
        if expert < 0:
            return
        row = tl.load(pairs + row)
    row_ok = row < rows
    x_row = (row // fan_out).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column_ok = column < columns
    inner = tl.arange(0, BLOCK)
    num_blocks = width // BLOCK
    weight_rows = columns
    if GATED:
        weight_rows = 2 * columns
    x_at = x + x_row[:, None] * width + inner[None, :]
    w_at = weight + (expert * weight_rows + column)[:, None] * width + inner[None, :]
    scale_row = expert * scale_rows + tl.program_id(0) * COLUMNS // BLOCK
    s_at = scales + scale_row * num_blocks
    up_at = w_at + columns.to(tl.int64) * width
    up_s_at = s_at + columns // BLOCK * num_blocks
    if SWAPPED:
        acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    else:
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = acc
    # A block's scales are fetched one block ahead. (Not two: Triton pipelines no loop that hands a
    # value on for more than one turn.)
    first = tl.program_id(2) * steps
    last = num_blocks - 1
    next_scale = tl.load(s_at + first)
    if GATED:
        next_up_scale = tl.load(up_s_at + first)
    if QUANTISED:
        next_x_scale = tl.load(x_scales + x_row + first * scale_stride, mask=row_ok, other=0.0)
    for i in range(STEPS if INTERPRETED else steps):  # the interpreter needs a Python number
        k = first + i
        ahead = tl.minimum(k + 1, last)
        x_part = tl.load(x_at + k * BLOCK, mask=row_ok[:, None], other=0.0)
        if QUANTISED:
            x_scale = next_x_scale
            next_x_scale = tl.load(x_scales + x_row + ahead * scale_stride, mask=row_ok, other=0.0)
        else:
            x_part, x_scale = in_e4m3(x_part, FP8_LIMIT, SMALLEST)
        w_part = tl.load(w_at + k * BLOCK, mask=column_ok[:, None], other=0.0)
        factor = x_scale * next_scale
        next_scale = tl.load(s_at + ahead)
        if SWAPPED:
            acc += _dot(w_part, tl.trans(x_part)) * factor[None, :]
        else:
            acc += _dot(x_part, tl.trans(w_part)) * factor[:, None]
        if GATED:
            w_part = tl.load(up_at + k * BLOCK, mask=column_ok[:, None], other=0.0)
            factor = x_scale * next_up_scale
            next_up_scale = tl.load(up_s_at + ahead)
            if SWAPPED:
                up += _dot(w_part, tl.trans(x_part)) * factor[None, :]
            else:
                up += _dot(x_part, tl.trans(w_part)) * factor[:, None]
    if GATED:
        acc = silu(acc) * up
    if SWAPPED:
        acc = tl.trans(acc)
    out_row = row.to(tl.int64)
    if SPLITS > 1:
        out_row += tl.program_id(2).to(tl.int64) * rows
    at = out + out_row[:, None] * columns + column[None, :]
    tl.store(at, round_to(acc, out.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])


@triton.jit
def _sum_splits(
    parts,  # [SPLITS, rows, columns] fp32; [.., 2 * columns], gate first, where GATED
    out,  # [rows, columns]
    rows,
    columns,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (block of the output): add the splits in order, then gate."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = tl.full((), 0, tl.int64) + rows  # which Triton makes a constant where it is 1
    size *= columns
    inside = index < size
    width = columns
    if GATED:
        width = 2 * columns
        size *= 2
    at = parts + index // columns * width + index % columns
    total = tl.zeros((BLOCK,), tl.float32)
    up = total
    for split in tl.static_range(SPLITS):
        start = at + split * size
        total += tl.load(start, mask=inside, other=0.0)
        if GATED:
            up += tl.load(start + columns, mask=inside, other=0.0)
    if GATED:
        total = silu(total) * up
    tl.store(out + index, round_to(total, out.dtype.element_ty), mask=inside)


_FIXED = {"BLOCK": FP8_BLOCK, "FP8_LIMIT": FP8_MAX, "SMALLEST": SMALLEST_AMAX}


def _signature(tiles: Tiles, *, grouped: bool = False, gated: bool = False) -> tuple[object, ...]:
    signature = {
        "x": "*fp8e4nv" if tiles.quantised else "*bf16",
        "x_scales": "*fp32" if tiles.quantised else "*bf16",
        "weight": "*fp8e4nv",
        "scales": "*fp32",
        "out": "*bf16" if tiles.splits == 1 else "*fp32",
        "pairs": "*i32" if grouped else "*bf16",
        "experts": "*i32" if grouped else "*bf16",
        "rows": "i32",
        "columns": "i32:16",
        "width": "i32:16",
        **dict.fromkeys(("scale_rows", "scale_stride", "fan_out", "steps"), "i32"),
        "STEPS": 0,
        **_FIXED,
        "ROWS": tiles.rows,
        "COLUMNS": tiles.columns,
        "SPLITS": tiles.splits,
        "GROUPED": grouped,
        "GATED": gated,
        "QUANTISED": tiles.quantised,
        "SWAPPED": tiles.swapped,
    }
    return _fp8_product, signature, {"num_warps": tiles.warps, "num_stages": tiles.stages}


COMPILE_SIGNATURES = (
    _signature(Tiles(rows=16, columns=128, swapped=True, splits=8)),
    _signature(Tiles(rows=16, columns=64, swapped=True)),
    _signature(Tiles(rows=32, columns=64, swapped=True, quantised=True)),
    _signature(Tiles(rows=64, columns=64, swapped=True, quantised=True, splits=4)),
    _signature(Tiles(rows=64, columns=64, swapped=True, quantised=True), gated=True),
    _signature(Tiles(rows=16, columns=64, swapped=True), gated=True),
    _signature(Tiles(rows=16, columns=64, swapped=True), grouped=True, gated=True),
    _signature(Tiles(rows=16, columns=64, swapped=True), grouped=True),
    _signature(Tiles(rows=64, columns=64, swapped=True, quantised=True), grouped=True, gated=True),
    _signature(Tiles(rows=64, columns=64, swapped=True, quantised=True), grouped=True),
    _signature(MANY_ROWS, grouped=True),
    _signature(MANY_ROWS_GATED, grouped=True, gated=True),
    (
        _quantise,
        {
            "x": "*bf16",
            "values": "*fp8e4nv",
            "scales": "*fp32",
            "rows": "i32",
            "width": "i32:16",
            "stride": "i32",
            **_FIXED,
            "ROWS": _QUANTISE_ROWS,
        },
    ),
    *(
        (
            _sum_splits,
            {
                "parts": "*fp32",
                "out": "*bf16",
                "rows": "i32",
                "columns": "i32:16",
                "SPLITS": 8,
                "GATED": gated,
                "BLOCK": _SUM_BLOCK,
            },
        )
        for gated in (False, True)
    ),
)
