"""Latent KV rows to bytes and back; contracts in `kernels/reference/rows.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.reference.rows import (
    FP8_MAX,
    SMALLEST_SCALE,
    check_decode_args,
    check_encode_args,
)
from echokv.kernels.triton.numerics import round_to, to_bfloat16, to_float8e4m3
from echokv.memory.formats import FP8_GROUP, RowFormat

_PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_COLUMNS = 128  # columns of one program of a plain row
_TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def encode_rows(latent: Tensor, rope: Tensor, fmt: RowFormat) -> Tensor:
    """Pack rows into bytes: [T, latent_dim] and [T, rope_dim] to [T, row_bytes] uint8."""
    check_encode_args(latent, rope, fmt)
    tokens = latent.shape[0]
    out = torch.empty(tokens, fmt.row_bytes, dtype=torch.uint8, device=latent.device)
    if tokens == 0:
        return out
    if fmt.name in _PLAIN:
        grid = (tokens, triton.cdiv(fmt.latent_dim + fmt.rope_dim, _COLUMNS))
        _encode_plain[grid](
            latent, rope, out.view(_PLAIN[fmt.name]), fmt.latent_dim, fmt.rope_dim, _COLUMNS,
            num_warps=1,
        )  # fmt: skip
        return out
    _encode_fp8[(tokens, fmt.latent_dim // FP8_GROUP + 1)](
        latent,
        rope,
        out.view(torch.float8_e4m3fn),
        out.view(torch.float32),
        out.view(torch.bfloat16),
        fmt.row_bytes,
        fmt.latent_dim,
        fmt.rope_dim,
        FP8_GROUP,
        triton.next_power_of_2(fmt.rope_dim),
        FP8_MAX,
        SMALLEST_SCALE,
        num_warps=1,
    )
    return out


def decode_rows(rows: Tensor, fmt: RowFormat, dtype: torch.dtype) -> Tensor:
    """Unpack rows: [..., row_bytes] uint8 to [..., latent_dim + rope_dim] of dtype."""
    check_decode_args(rows, fmt)
    if fmt.name in _PLAIN:
        return rows.view(_PLAIN[fmt.name]).to(dtype)
    width = fmt.latent_dim + fmt.rope_dim
    out = torch.empty(*rows.shape[:-1], width, dtype=dtype, device=rows.device)
    count = out.numel() // width
    if count == 0:
        return out
    _decode_fp8[(count, fmt.latent_dim // FP8_GROUP + 1)](
        rows.view(torch.float8_e4m3fn),
        rows.view(torch.float32),
        rows.view(torch.bfloat16),
        out,
        fmt.row_bytes,
        fmt.latent_dim,
        fmt.rope_dim,
        FP8_GROUP,
        triton.next_power_of_2(fmt.rope_dim),
        _TL_DTYPES[dtype],
        num_warps=1,
    )
    return out


@triton.jit
def _encode_plain(
    latent,  # [T, latent_dim]
    rope,  # [T, rope_dim]
    out,  # [T, latent_dim + rope_dim]
    latent_dim,
    rope_dim,
    COLUMNS: tl.constexpr,
):
    """Program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_latent = column < latent_dim
    in_rope = (column >= latent_dim) & (column < latent_dim + rope_dim)
    first = tl.load(latent + row * latent_dim + column, mask=in_latent, other=0.0)
    second = tl.load(rope + row * rope_dim + column - latent_dim, mask=in_rope, other=0.0)
    value = tl.where(in_latent, first, second).to(tl.float32)
    value = round_to(value, out.dtype.element_ty)
    tl.store(out + row * (latent_dim + rope_dim) + column, value, mask=in_latent | in_rope)


@triton.jit
def _encode_fp8(
    latent,  # [T, latent_dim]
    rope,  # [T, rope_dim]
    values,  # [T, row_bytes] e4m3
    scales,  # the same bytes as fp32
    ropes,  # the same bytes as bf16
    row_bytes,
    latent_dim,
    rope_dim,
    GROUP: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    FP8_LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """Program (row, group): one group of latent values with its scale; the last, the rope part."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    if group * GROUP < latent_dim:
        column = group * GROUP + tl.arange(0, GROUP)
        x = tl.load(latent + row * latent_dim + column).to(tl.float32)
        # Correctly rounded divisions: the same bytes as the reference's.
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), axis=0), FP8_LIMIT), SMALLEST)
        scaled = tl.div_rn(x, tl.full((GROUP,), 0.0, tl.float32) + scale)
        scaled = tl.minimum(tl.maximum(scaled, -FP8_LIMIT), FP8_LIMIT)
        tl.store(values + row * row_bytes + column, to_float8e4m3(scaled))
        tl.store(scales + (row * row_bytes + latent_dim) // 4 + group, scale)
    else:
        rope_column = tl.arange(0, ROPE_BLOCK)
        in_rope = rope_column < rope_dim
        rotary = tl.load(rope + row * rope_dim + rope_column, mask=in_rope, other=0.0)
        start = (row * row_bytes + latent_dim + latent_dim // GROUP * 4) // 2
        tl.store(ropes + start + rope_column, to_bfloat16(rotary.to(tl.float32)), mask=in_rope)


@triton.jit
def _decode_fp8(
    values,  # [N, row_bytes] e4m3
    scales,  # the same bytes as fp32
    ropes,  # the same bytes as bf16
    out,  # [N, latent_dim + rope_dim]
    row_bytes,
    latent_dim,
    rope_dim,
    GROUP: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Program (row, group), as in `_encode_fp8`."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    target = out + row * (latent_dim + rope_dim)
    if group * GROUP < latent_dim:
        column = group * GROUP + tl.arange(0, GROUP)
        x = tl.load(values + row * row_bytes + column).to(tl.float32)
        scale = tl.load(scales + (row * row_bytes + latent_dim) // 4 + group)
        tl.store(target + column, round_to(x * scale, DTYPE))
    else:
        rope_column = tl.arange(0, ROPE_BLOCK)
        in_rope = rope_column < rope_dim
        start = (row * row_bytes + latent_dim + latent_dim // GROUP * 4) // 2
        rotary = tl.load(ropes + start + rope_column, mask=in_rope, other=0.0).to(tl.float32)
        tl.store(target + latent_dim + rope_column, round_to(rotary, DTYPE), mask=in_rope)


_FP8_ROW = {"row_bytes": "i32:16", "latent_dim": "i32:16", "rope_dim": "i32:16", "GROUP": 128,
            "ROPE_BLOCK": 64}  # fmt: skip
COMPILE_SIGNATURES = (
    (
        _encode_plain,
        {"latent": "*bf16", "rope": "*bf16", "out": "*bf16", "latent_dim": "i32:16",
         "rope_dim": "i32:16", "COLUMNS": _COLUMNS},
        {"num_warps": 1},
    ),
    (
        _encode_fp8,
        {"latent": "*bf16", "rope": "*bf16", "values": "*fp8e4nv", "scales": "*fp32",
         "ropes": "*bf16", **_FP8_ROW, "FP8_LIMIT": FP8_MAX, "SMALLEST": SMALLEST_SCALE},
        {"num_warps": 1},
    ),
    (
        _decode_fp8,
        {"values": "*fp8e4nv", "scales": "*fp32", "ropes": "*bf16", "out": "*bf16", **_FP8_ROW,
         "DTYPE": tl.bfloat16},
        {"num_warps": 1},
    ),
)  # fmt: skip
