"""Sparse latent attention in three kernels; contract in `kernels/reference/sparse_mla.py`.

The first gives the logits of a tile of rows for a block of heads, and each tile's maximum; so the
second knows a token's maximum before it begins, and adds up probabilities times rows for one group
of 128 columns over a fixed piece of the rows; the third adds the pieces in order. Each does one
product over few registers, and a row is unpacked once for all the heads of a block. Tiles and
pieces depend on k alone, so a token's result is the same in any batch.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.reference.sparse_mla import check_mla_args
from echokv.kernels.triton.numerics import INTERPRETED, dot, round_to
from echokv.memory.formats import FP8_GROUP, RowFormat

_TOKENS_AT_ONCE = 32  # bounds the workspace: 2 MiB a token at 128 heads and k = 2048
_PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class MlaTiles:
    """How both products are cut up."""

    heads: int  # of a program
    columns: int  # latent columns of one step (logits) or of a program (values)
    rows: int  # of a tile of logits
    value_rows: int  # of a step of the second product
    split: int  # rows of one program of the second product; a multiple of both
    warps: int
    stages: int
    value_stages: int


def sparse_mla(
    query: Tensor, rows: Tensor, device_slots: Tensor, fmt: RowFormat, scale: float
) -> Tensor:
    """Attend query [T, H, latent + rope] to rows named by device_slots [T, k]: [T, H, latent]."""
    check_mla_args(query, rows, device_slots, fmt)
    tokens, heads, _ = query.shape
    out = torch.empty(tokens, heads, fmt.latent_dim, dtype=query.dtype, device=query.device)
    if tokens == 0 or device_slots.shape[1] == 0:
        return out.zero_()
    is_fp8 = fmt.name == "fp8_ds_mla"
    compute = _compute_dtype(query.dtype, torch.bfloat16 if is_fp8 else _PLAIN[fmt.name])
    tiles = mla_tiles(heads, compute)
    for first in range(0, tokens, _TOKENS_AT_ONCE):
        part = slice(first, first + _TOKENS_AT_ONCE)
        attend(query[part], rows, device_slots[part], fmt, scale, out[part], compute, tiles)
    return out


def attend(
    query: Tensor,
    rows: Tensor,
    device_slots: Tensor,
    fmt: RowFormat,
    scale: float,
    out: Tensor,
    compute: tl.dtype,
    tiles: MlaTiles,
) -> None:
    """`sparse_mla` of a few tokens into out, with products in `compute`."""
    tokens, heads, _ = query.shape
    k, device = device_slots.shape[1], query.device
    is_fp8 = fmt.name == "fp8_ds_mla"
    values = rows.view(torch.float8_e4m3fn if is_fp8 else _PLAIN[fmt.name])
    ropes = rows.view(torch.bfloat16) if is_fp8 else values
    rope_at = fmt.latent_dim + (2 * fmt.latent_dim // FP8_GROUP - fmt.latent_dim // 2) * is_fp8
    unit = math.gcd(8, ropes.shape[1], rope_at)  # wide loads need to know that addresses are even
    num_tiles, splits = triton.cdiv(k, tiles.rows), triton.cdiv(k, tiles.split)
    logits = torch.empty(tokens, heads, num_tiles * tiles.rows, device=device)
    tops = torch.empty(tokens, num_tiles, heads, device=device)
    partial = torch.empty(tokens, splits, heads, fmt.latent_dim, device=device)
    totals = torch.empty(tokens, splits, heads, device=device)
    head_blocks = triton.cdiv(heads, tiles.heads)
    shared = (heads, k, logits.shape[2], values.shape[1], fmt.row_bytes // 4)
    sizes = (fmt.latent_dim, max(16, triton.next_power_of_2(fmt.rope_dim)), tiles.columns)
    scales = rows.view(torch.float32)
    _logits[(num_tiles, head_blocks, tokens)](
        query, values, scales, ropes, device_slots, logits, tops, *shared,
        ropes.shape[1] // unit, rope_at // unit, unit, fmt.rope_dim, *sizes, FP8_GROUP,
        tiles.heads, tiles.rows, is_fp8, compute, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    groups = triton.cdiv(fmt.latent_dim, tiles.columns)
    _values[(groups * head_blocks, splits, tokens)](
        values, scales, device_slots, logits, tops, partial, totals, scale * _LOG2_E, *shared,
        num_tiles, fmt.latent_dim, tiles.columns, FP8_GROUP, triton.next_power_of_2(num_tiles),
        tiles.split, tiles.heads, tiles.value_rows, is_fp8, compute,
        num_warps=tiles.warps, num_stages=tiles.value_stages,
    )  # fmt: skip
    _combine[(heads, tokens)](
        partial, totals, out, heads, fmt.latent_dim, splits, triton.next_power_of_2(splits),
        max(16, triton.next_power_of_2(fmt.latent_dim)),
    )  # fmt: skip


def mla_tiles(heads: int, compute: tl.dtype) -> MlaTiles:
    """Tiles for a number of heads; the largest that spill nothing on Hopper."""
    if compute == tl.float32:
        return MlaTiles(
            heads=16, columns=64, rows=32, value_rows=16, split=256, warps=4, stages=1,
            value_stages=1,
        )  # fmt: skip
    block = min(128, max(16, triton.next_power_of_2(heads)))
    return MlaTiles(
        heads=block, columns=128, rows=64, value_rows=64, split=512,
        warps=8 if block == 128 else 4, stages=3, value_stages=3,
    )  # fmt: skip


def _compute_dtype(query: torch.dtype, rows: torch.dtype) -> tl.dtype:
    """bf16 products when both sides are bf16 (e4m3 is unpacked to it), else fp32."""
    return tl.bfloat16 if query == rows == torch.bfloat16 else tl.float32


@triton.jit
def _unpacked(raw, factor, IS_FP8: tl.constexpr, DTYPE: tl.constexpr):
    """Latent values as DTYPE: times their row's scale where they are fp8."""
    wide = raw.to(tl.float32)
    if IS_FP8:
        wide = wide * factor[:, None]
    return round_to(wide, DTYPE)


@triton.jit
def _logits(
    query,  # [T, H, LATENT + ROPE_DIM]
    values,  # [N, row_values] latent in the rows' dtype (e4m3 for fp8)
    scales,  # [N, row_scales] the same bytes as fp32; read where IS_FP8
    ropes,  # [N, row_ropes * UNIT] the same bytes in the rope part's dtype
    device_slots,  # [T, k]
    logits,  # [T, H, width] fp32 out; not written in tiles without rows
    tops,  # [T, tiles, H] fp32 out: a tile's largest logit
    heads,
    k,
    width,
    row_values,
    row_scales,
    row_ropes,  # in units of UNIT values, as is rope_at
    rope_at,  # where the rope part starts in a row of ropes
    UNIT: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,  # ROPE_DIM or more
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    IS_FP8: tl.constexpr,
    DTYPE: tl.constexpr,  # of the product
):
    """Program (tile of rows, block of heads, token)."""
    tile = tl.program_id(0)
    token = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    head_ok = head < heads
    index = tile * ROWS + tl.arange(0, ROWS)
    slot = tl.load(device_slots + token * k + index, mask=index < k, other=-1).to(tl.int64)
    named = slot >= 0
    top_at = tops + (token * tl.num_programs(0) + tile) * heads + head
    if tl.max(slot, axis=0) < 0:
        tl.store(top_at, tl.full((HEADS,), float("-inf"), tl.float32), mask=head_ok)
        return
    query_row = (query + (token * heads + head) * (LATENT + ROPE_DIM))[:, None]
    rope_column = tl.arange(0, ROPE)[None, :]
    rope_ok = rope_column < ROPE_DIM
    q_rope = tl.load(query_row + LATENT + rope_column, mask=head_ok[:, None] & rope_ok, other=0.0)
    rope_row = ((slot * row_ropes + rope_at) * UNIT)[:, None]
    rope = tl.load(ropes + rope_row + rope_column, mask=named[:, None] & rope_ok, other=0.0)
    acc = tl.zeros((HEADS, ROWS), tl.float32)
    for start in range(0, LATENT, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = column < LATENT
        q = tl.load(query_row + column, mask=head_ok[:, None] & inside, other=0.0)
        row = (slot * row_values)[:, None]
        raw = tl.load(values + row + column, mask=named[:, None] & inside, other=0.0)
        factor = named
        if IS_FP8:
            at = scales + slot * row_scales + LATENT // 4 + start // GROUP
            factor = tl.load(at, mask=named, other=0.0)
        acc += dot(q.to(DTYPE), tl.trans(_unpacked(raw, factor, IS_FP8, DTYPE)))
    acc += dot(q_rope.to(DTYPE), tl.trans(round_to(rope.to(tl.float32), DTYPE)))
    acc = tl.where(named[None, :], acc, float("-inf"))
    tl.store(top_at, tl.max(acc, axis=1), mask=head_ok)
    at = logits + (token * heads + head)[:, None] * width + index[None, :]
    tl.store(at, acc, mask=head_ok[:, None])


@triton.jit
def _values(
    values,  # as in _logits
    scales,
    device_slots,
    logits,  # [T, H, width]
    tops,  # [T, tiles, H]
    partial,  # [T, splits, H, LATENT] fp32 out: sums of probabilities times rows
    totals,  # [T, splits, H] fp32 out: sums of probabilities
    scale_log2,
    heads,
    k,
    width,
    row_values,
    row_scales,
    tiles,
    LATENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,  # tiles or more
    SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    IS_FP8: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Program (group of columns and block of heads, split of the rows, token)."""
    groups: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
    group = tl.program_id(0) % groups
    split = tl.program_id(1)
    token = tl.program_id(2).to(tl.int64)
    head = tl.program_id(0) // groups * HEADS + tl.arange(0, HEADS)
    head_ok = head < heads
    tile = tl.arange(0, TILES)
    top = tl.load(
        tops + (token * tiles + tile[None, :]) * heads + head[:, None],
        mask=head_ok[:, None] & (tile < tiles)[None, :],
        other=float("-inf"),
    )
    top = tl.max(top, axis=1)
    top = tl.where(top == float("-inf"), 0.0, top)  # no rows: -inf - -inf would be NaN
    entry = split * SPLIT + tl.arange(0, SPLIT)
    slots = device_slots + token * k
    count = tl.sum((tl.load(slots + entry, mask=entry < k, other=-1) >= 0).to(tl.int32))
    column = group * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = column < LATENT
    acc = tl.zeros((HEADS, COLUMNS), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    logits_row = (logits + (token * heads + head) * width)[:, None]
    for start in range(0, SPLIT if INTERPRETED else count, ROWS):
        index = split * SPLIT + start + tl.arange(0, ROWS)
        slot = tl.load(slots + index, mask=index < k, other=-1).to(tl.int64)
        named = slot >= 0
        logit = tl.load(
            logits_row + index[None, :],
            mask=head_ok[:, None] & named[None, :],
            other=float("-inf"),
        )
        raw = tl.load(
            values + (slot * row_values)[:, None] + column,
            mask=named[:, None] & inside,
            other=0.0,
        )
        # Scaled after the subtraction, which leaves small numbers: a smaller rounding error.
        probs = tl.exp2((logit - top[:, None]) * scale_log2)
        total += tl.sum(probs, axis=1)
        factor = named
        if IS_FP8:
            at = scales + slot * row_scales + LATENT // 4 + group * COLUMNS // GROUP
            factor = tl.load(at, mask=named, other=0.0)
            probs *= factor[None, :]
        row = _unpacked(raw, factor, False, DTYPE)  # its scale is in the probabilities
        acc += dot(round_to(probs, DTYPE), row)
    sums_at = (token * tl.num_programs(1) + split) * heads + head
    tl.store(totals + sums_at, total, mask=head_ok & (group == 0))
    at = partial + sums_at[:, None] * LATENT + column
    tl.store(at, acc, mask=head_ok[:, None] & inside)


@triton.jit
def _combine(
    partial,  # [T, splits, H, latent_dim] fp32
    totals,  # [T, splits, H] fp32
    out,  # [T, H, latent_dim]
    heads,
    latent_dim,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
):
    """Program (head, token): the splits' sums, added in order; zeros where there were no rows."""
    token = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0)
    column = tl.arange(0, BLOCK_LATENT)
    split = tl.arange(0, BLOCK_SPLITS)
    sums_at = token * SPLITS * heads + head
    total = tl.sum(tl.load(totals + sums_at + split * heads, mask=split < SPLITS, other=0.0))
    acc = tl.zeros((BLOCK_LATENT,), tl.float32)
    for i in tl.static_range(SPLITS):
        at = partial + (sums_at + i * heads) * latent_dim + column
        acc += tl.load(at, mask=column < latent_dim, other=0.0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    target = out + (token * heads + head) * latent_dim + column
    tl.store(target, round_to(acc, out.dtype.element_ty), mask=column < latent_dim)


def _signatures(query: str, values: str) -> tuple[tuple[object, ...], ...]:
    compute = tl.bfloat16 if query == "*bf16" and values != "*fp32" else tl.float32
    tiles = mla_tiles(128, compute)
    is_fp8 = values == "*fp8e4nv"
    sizes = {
        **dict.fromkeys(("heads", "k", "width", "row_values"), "i32:16"),
        "row_scales": "i32" if is_fp8 else "i32:16",  # 656 B are 164 fp32
    }
    fixed = {"LATENT": 512, "COLUMNS": tiles.columns, "GROUP": FP8_GROUP, "HEADS": tiles.heads,
             "IS_FP8": is_fp8, "DTYPE": compute}  # fmt: skip
    logits = {
        "query": query,
        "values": values,
        "scales": "*fp32",
        "ropes": "*bf16" if is_fp8 else values,
        "device_slots": "*i32",
        "logits": "*fp32",
        "tops": "*fp32",
        **sizes,
        "row_ropes": "i32",
        "rope_at": "i32",
        "UNIT": 8,
        "ROPE_DIM": 64,
        "ROPE": 64,
        "ROWS": tiles.rows,
        **fixed,
    }
    sums = {
        "values": values,
        "scales": "*fp32",
        "device_slots": "*i32",
        **dict.fromkeys(("logits", "tops", "partial", "totals"), "*fp32"),
        "scale_log2": "fp32",
        **sizes,
        "tiles": "i32",
        "TILES": 32,
        "SPLIT": tiles.split,
        "ROWS": tiles.value_rows,
        **fixed,
    }
    return (
        (_logits, logits, {"num_warps": tiles.warps, "num_stages": tiles.stages}),
        (_values, sums, {"num_warps": tiles.warps, "num_stages": tiles.value_stages}),
    )


COMPILE_SIGNATURES = (
    *_signatures("*bf16", "*fp8e4nv"),
    *_signatures("*bf16", "*bf16"),
    *_signatures("*bf16", "*fp32"),
    *_signatures("*fp32", "*fp8e4nv"),
    *_signatures("*fp32", "*bf16"),
    *_signatures("*fp32", "*fp32"),
    (
        _combine,
        {
            "partial": "*fp32",
            "totals": "*fp32",
            "out": "*bf16",
            "heads": "i32",
            "latent_dim": "i32",
            "SPLITS": 4,
            "BLOCK_SPLITS": 4,
            "BLOCK_LATENT": 512,
        },
    ),
)
