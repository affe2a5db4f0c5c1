"""Sparse latent attention, split over keys; contract in `kernels/reference/sparse_mla.py`.

One program attends a block of heads to a fixed piece of a token's rows and leaves a partial
result; a second kernel merges the pieces in order. The pieces depend on k alone, so a token's
result is the same in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.reference.sparse_mla import check_mla_args
from echokv.kernels.triton.numerics import dot, round_to
from echokv.memory.formats import FP8_GROUP, RowFormat

_SPLIT_ROWS = 256  # rows of one program
_TOKENS_AT_ONCE = 64  # bounds the partial results: 8 splits x 128 heads x 512 fp32 is 2 MiB each
_PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def sparse_mla(
    query: Tensor, rows: Tensor, device_slots: Tensor, fmt: RowFormat, scale: float
) -> Tensor:
    """Attend query [T, H, latent + rope] to rows named by device_slots [T, k]: [T, H, latent]."""
    check_mla_args(query, rows, device_slots, fmt)
    tokens, heads, _ = query.shape
    out = torch.empty(tokens, heads, fmt.latent_dim, dtype=query.dtype, device=query.device)
    splits = triton.cdiv(device_slots.shape[1], _SPLIT_ROWS)
    if splits == 0:
        return out.zero_()
    at_once = min(tokens, _TOKENS_AT_ONCE)
    partial = torch.empty(
        at_once, splits, heads, fmt.latent_dim, dtype=torch.float32, device=query.device
    )
    logsums = torch.empty(at_once, splits, heads, dtype=torch.float32, device=query.device)
    for first in range(0, tokens, _TOKENS_AT_ONCE):
        part = slice(first, first + _TOKENS_AT_ONCE)
        _attend(query[part], rows, device_slots[part], fmt, scale, partial, logsums, out[part])
    return out


def _attend(
    query: Tensor,
    rows: Tensor,
    device_slots: Tensor,
    fmt: RowFormat,
    scale: float,
    partial: Tensor,
    logsums: Tensor,
    out: Tensor,
) -> None:
    tokens, heads, _ = query.shape
    k, splits = device_slots.shape[1], logsums.shape[1]
    is_fp8 = fmt.name == "fp8_ds_mla"
    values = rows.view(torch.float8_e4m3fn if is_fp8 else _PLAIN[fmt.name])
    ropes = rows.view(torch.bfloat16) if is_fp8 else values
    rope_at = (fmt.latent_dim + 4 * (fmt.latent_dim // FP8_GROUP)) // 2
    compute = _compute_dtype(query.dtype, ropes.dtype)
    block_heads, block_rows, options = _tiles(compute)
    _attend_split[(triton.cdiv(heads, block_heads), splits, tokens)](
        query,
        values,
        rows.view(torch.float32),
        ropes,
        device_slots,
        partial,
        logsums,
        scale * 1.4426950408889634,
        heads,
        k,
        values.shape[1],
        fmt.row_bytes // 4,
        ropes.shape[1],
        rope_at if is_fp8 else fmt.latent_dim,
        fmt.latent_dim,
        fmt.rope_dim,
        FP8_GROUP,
        min(_SPLIT_ROWS, triton.cdiv(k, block_rows) * block_rows),
        block_heads,
        block_rows,
        max(16, triton.next_power_of_2(fmt.latent_dim)),
        max(16, triton.next_power_of_2(fmt.rope_dim)),
        is_fp8,
        compute,
        **options,
    )
    _merge_splits[(heads, tokens)](
        partial,
        logsums,
        out,
        heads,
        fmt.latent_dim,
        splits,
        triton.next_power_of_2(splits),
        max(16, triton.next_power_of_2(fmt.latent_dim)),
    )


def _tiles(compute: tl.dtype) -> tuple[int, int, dict[str, int]]:
    """Heads and rows of a tile, and launch options: the largest that spill nothing on Hopper."""
    return 16, 32 if compute == tl.bfloat16 else 16, {"num_warps": 8, "num_stages": 1}


def _compute_dtype(query: torch.dtype, rows: torch.dtype) -> tl.dtype:
    """bf16 products when both sides are bf16 (e4m3 is unpacked to it), else fp32."""
    return tl.bfloat16 if query == rows == torch.bfloat16 else tl.float32


@triton.jit
def _attend_split(
    query,  # [T, H, latent_dim + rope_dim]
    values,  # [N, row_values] latent in the rows' dtype (e4m3 for fp8)
    scales,  # [N, row_scales] the same bytes as fp32
    ropes,  # [N, row_ropes] the same bytes in the rope part's dtype
    device_slots,  # [T, k]
    partial,  # [T, splits, H, latent_dim] fp32 out
    logsums,  # [T, splits, H] fp32 out: log2 of the split's sum; -inf: nothing, partial unwritten
    scale_log2,
    heads,
    k,
    row_values,
    row_scales,
    row_ropes,
    rope_at,  # where the rope part starts in a row of ropes
    latent_dim,
    rope_dim,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    IS_FP8: tl.constexpr,
    DTYPE: tl.constexpr,  # of the products
):
    """Program (block of heads, split, token)."""
    token = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    head = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    head_ok = head < heads
    sums_at = (token * tl.num_programs(1) + split) * heads + head
    slots = device_slots + token * k
    if tl.load(slots + split * SPLIT) < 0:
        tl.store(logsums + sums_at, tl.full((BLOCK_HEADS,), float("-inf"), tl.float32), head_ok)
        return
    latent_column = tl.arange(0, BLOCK_LATENT)
    rope_column = tl.arange(0, BLOCK_ROPE)
    latent_ok = latent_column < latent_dim
    rope_ok = rope_column < rope_dim
    query_row = (query + (token * heads + head) * (latent_dim + rope_dim))[:, None]
    q_latent = tl.load(
        query_row + latent_column[None, :], mask=head_ok[:, None] & latent_ok[None, :], other=0.0
    )
    q_rope = tl.load(
        query_row + latent_dim + rope_column[None, :],
        mask=head_ok[:, None] & rope_ok[None, :],
        other=0.0,
    )
    q_latent = q_latent.to(DTYPE)
    q_rope = q_rope.to(DTYPE)
    top = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    acc = tl.zeros((BLOCK_HEADS, BLOCK_LATENT), tl.float32)
    for start in range(0, SPLIT, BLOCK_ROWS):
        index = split * SPLIT + start + tl.arange(0, BLOCK_ROWS)
        slot = tl.load(slots + index, mask=index < k, other=-1).to(tl.int64)
        named = slot >= 0
        latent_mask = named[:, None] & latent_ok[None, :]
        rope_mask = named[:, None] & rope_ok[None, :]
        latent = tl.load(
            values + slot[:, None] * row_values + latent_column[None, :],
            mask=latent_mask,
            other=0.0,
        )  # [rows, latent]
        if IS_FP8:
            group = tl.arange(0, BLOCK_LATENT // GROUP)
            factor = tl.load(
                scales + slot[:, None] * row_scales + latent_dim // 4 + group[None, :],
                mask=named[:, None] & (group[None, :] * GROUP < latent_dim),
                other=0.0,
            )  # [rows, groups]
            groups = tl.reshape(latent, [BLOCK_ROWS, BLOCK_LATENT // GROUP, GROUP])
            groups = groups.to(tl.float32) * factor[:, :, None]
            latent = tl.reshape(groups, [BLOCK_ROWS, BLOCK_LATENT])
        latent = round_to(latent.to(tl.float32), DTYPE)
        rope = tl.load(
            ropes + slot[:, None] * row_ropes + rope_at + rope_column[None, :],
            mask=rope_mask,
            other=0.0,
        )
        rope = round_to(rope.to(tl.float32), DTYPE)
        logits = dot(q_latent, tl.trans(latent)) + dot(q_rope, tl.trans(rope))
        logits = tl.where(named[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, axis=1))
        # Nothing named so far: -inf - -inf would be NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        # Scaled after the subtraction, which leaves small numbers: a smaller rounding error.
        fade = tl.exp2((top - shift) * scale_log2)
        probs = tl.exp2((logits - shift[:, None]) * scale_log2)
        total = total * fade + tl.sum(probs, axis=1)
        acc = acc * fade[:, None] + dot(round_to(probs, DTYPE), latent)
        top = higher
    tl.store(logsums + sums_at, top * scale_log2 + tl.log2(total), mask=head_ok)
    target = partial + sums_at[:, None] * latent_dim + latent_column[None, :]
    tl.store(target, acc / total[:, None], mask=head_ok[:, None] & latent_ok[None, :])


@triton.jit
def _merge_splits(
    partial,  # [T, splits, H, latent_dim] fp32
    logsums,  # [T, splits, H] fp32
    out,  # [T, H, latent_dim]
    heads,
    latent_dim,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
):
    """Program (head, token): the splits' results, weighted by their sums, in order."""
    token = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0)
    column = tl.arange(0, BLOCK_LATENT)
    split = tl.arange(0, BLOCK_SPLITS)
    sums_at = (token * SPLITS + split) * heads + head
    sums = tl.load(logsums + sums_at, mask=split < SPLITS, other=float("-inf"))
    top = tl.max(sums, axis=0)
    weights = tl.exp2(sums - tl.where(top == float("-inf"), 0.0, top))
    acc = tl.zeros((BLOCK_LATENT,), tl.float32)
    for i in range(SPLITS):
        weight = tl.sum(tl.where(split == i, weights, 0.0), axis=0)
        at = ((token * SPLITS + i) * heads + head) * latent_dim + column
        # A split of weight 0 may never have been written.
        part = tl.load(partial + at, mask=column < tl.where(weight > 0.0, latent_dim, 0), other=0.0)
        acc += weight * part
    total = tl.sum(weights, axis=0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    result = round_to(acc, out.dtype.element_ty)
    target = out + (token * heads + head) * latent_dim + column
    tl.store(target, result, mask=column < latent_dim)


def _signature(query: str, values: str) -> tuple[object, ...]:
    compute = tl.bfloat16 if query == "*bf16" and values != "*fp32" else tl.float32
    block_heads, block_rows, options = _tiles(compute)
    is_fp8 = values == "*fp8e4nv"
    sizes = ("heads", "k", "row_values", "row_scales", "row_ropes", "rope_at")
    return (
        _attend_split,
        {
            "query": query,
            "values": values,
            "scales": "*fp32",
            "ropes": "*bf16" if is_fp8 else values,
            "device_slots": "*i32",
            "partial": "*fp32",
            "logsums": "*fp32",
            "scale_log2": "fp32",
            **dict.fromkeys((*sizes, "latent_dim", "rope_dim"), "i32:16"),
            # 656 B: 164 fp32, and in bf16 the rope part starts at 264.
            **(dict.fromkeys(("row_scales", "row_ropes", "rope_at"), "i32") if is_fp8 else {}),
            "GROUP": FP8_GROUP,
            "SPLIT": _SPLIT_ROWS,
            "BLOCK_HEADS": block_heads,
            "BLOCK_ROWS": block_rows,
            "BLOCK_LATENT": 512,
            "BLOCK_ROPE": 64,
            "IS_FP8": is_fp8,
            "DTYPE": compute,
        },
        options,
    )


COMPILE_SIGNATURES = (
    _signature("*bf16", "*fp8e4nv"),
    _signature("*bf16", "*bf16"),
    _signature("*bf16", "*fp32"),
    _signature("*fp32", "*fp8e4nv"),
    _signature("*fp32", "*bf16"),
    _signature("*fp32", "*fp32"),
    (
        _merge_splits,
        {
            "partial": "*fp32",
            "logsums": "*fp32",
            "out": "*bf16",
            "heads": "i32",
            "latent_dim": "i32",
            "SPLITS": 8,
            "BLOCK_SPLITS": 8,
            "BLOCK_LATENT": 512,
        },
    ),
)
