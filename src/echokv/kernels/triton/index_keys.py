"""Indexer keys and queries: rotate, quantise, write; contracts in `reference/index_keys.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.reference.index_keys import (
    FP8_MAX,
    SMALLEST_AMAX,
    check_rotatable,
    check_write_args,
)
from echokv.kernels.triton.numerics import round_to, to_float8e4m3
from echokv.memory.formats import IndexKeyFormat
from echokv.memory.slots import BLOCK_TOKENS

_PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def write_index_keys(keys: Tensor, host_slots: Tensor, pages: Tensor, fmt: IndexKeyFormat) -> None:
    """Store keys [T, D] at host_slots [T] int32 (-1 skips) of pages [n_pages, page_bytes] uint8."""
    check_write_args(keys, host_slots, pages, fmt)
    if fmt.name == "fp8":
        check_rotatable(fmt.head_dim)
    tokens = keys.shape[0]
    if tokens == 0:
        return
    if fmt.name in _PLAIN:
        _write_plain[(tokens,)](
            keys,
            host_slots,
            pages.view(_PLAIN[fmt.name]),
            fmt.head_dim,
            triton.next_power_of_2(fmt.head_dim),
            num_warps=1,
        )
        return
    _write_fp8[(tokens,)](
        keys,
        host_slots,
        pages.view(torch.float8_e4m3fn),
        pages.view(torch.float32),
        fmt.page_bytes,
        BLOCK_TOKENS,
        fmt.head_dim,
        fmt.head_dim.bit_length() - 1,
        FP8_MAX,
        SMALLEST_AMAX,
        num_warps=1,
    )


def quantise_query(query: Tensor, weights: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Rotate and quantise a query as keys are, and fold its scales into the weights.

    Args:
        query: [T, H, D] float.
        weights: [T, H] float32.
        head_dim: D, a power of two.

    Returns:
        [T, H, D] float8_e4m3fn, and [T, H] float32: weights * D ** -0.5 * the query's scales.
    """
    check_rotatable(head_dim)
    tokens, heads, _ = query.shape
    values = torch.empty(query.shape, dtype=torch.float8_e4m3fn, device=query.device)
    folded = torch.empty_like(weights)
    if tokens:
        _quantise_query[(tokens, triton.cdiv(heads, 16))](
            query,
            weights,
            values,
            folded,
            heads,
            16,
            head_dim,
            head_dim.bit_length() - 1,
            FP8_MAX,
            SMALLEST_AMAX,
        )
    return values, folded


@triton.jit
def _rotate_and_quantise(
    x,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    LOG_SIZE: tl.constexpr,
    FP8_LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """[ROWS, SIZE] -> e4m3 codes [ROWS, SIZE] and power-of-two fp32 scales [ROWS].

    A butterfly in the order of the reference's, so that both give the same bytes.
    """
    dtype: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    for stage in tl.static_range(LOG_SIZE):
        pairs = tl.reshape(x, [ROWS, SIZE // (2 << stage), 2, 1 << stage])
        left, right = tl.split(tl.permute(pairs, [0, 1, 3, 2]))
        both = tl.permute(tl.join(left + right, left - right), [0, 1, 3, 2])
        x = tl.reshape(both, [ROWS, SIZE])
    x = round_to(x * (SIZE**-0.5), dtype).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), SMALLEST)
    bits = (amax * (1.0 / FP8_LIMIT)).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    x = tl.minimum(tl.maximum(x * inverse[:, None], -FP8_LIMIT), FP8_LIMIT)
    return to_float8e4m3(x), scale


@triton.jit
def _write_plain(
    keys,  # [T, D]
    host_slots,  # [T]
    pages,  # [n_pages, 64, D]
    size,
    BLOCK: tl.constexpr,
):
    """Program (token)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(host_slots + token).to(tl.int64)
    if slot >= 0:
        column = tl.arange(0, BLOCK)
        x = tl.load(keys + token * size + column, mask=column < size, other=0.0).to(tl.float32)
        x = round_to(x, pages.dtype.element_ty)
        tl.store(pages + slot * size + column, x, mask=column < size)


@triton.jit
def _write_fp8(
    keys,  # [T, D]
    host_slots,  # [T]
    values,  # [n_pages, page_bytes] e4m3
    scales,  # the same bytes as fp32
    page_bytes,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    LOG_SIZE: tl.constexpr,
    FP8_LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """Program (token)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(host_slots + token).to(tl.int64)
    if slot >= 0:
        column = tl.arange(0, SIZE)[None, :]
        x = tl.load(keys + token * SIZE + column)
        codes, scale = _rotate_and_quantise(x, 1, SIZE, LOG_SIZE, FP8_LIMIT, SMALLEST)
        start = slot // PAGE * page_bytes
        tl.store(values + start + slot % PAGE * SIZE + column, codes)
        at = (start + PAGE * SIZE) // 4 + slot % PAGE
        tl.store(scales + at + tl.arange(0, 1), scale)


@triton.jit
def _quantise_query(
    query,  # [T, H, D]
    weights,  # [T, H]
    values,  # [T, H, D] e4m3
    folded,  # [T, H]
    heads,
    BLOCK_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    LOG_SIZE: tl.constexpr,
    FP8_LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """Program (token, block of heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    valid = head < heads
    row = token * heads + head
    at = row[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(query + at, mask=valid[:, None], other=0.0)
    codes, scale = _rotate_and_quantise(x, BLOCK_HEADS, SIZE, LOG_SIZE, FP8_LIMIT, SMALLEST)
    tl.store(values + at, codes, mask=valid[:, None])
    weight = tl.load(weights + row, mask=valid, other=0.0) * (SIZE**-0.5)
    tl.store(folded + row, weight * scale, mask=valid)


_QUANTISE = {"SIZE": 128, "LOG_SIZE": 7, "FP8_LIMIT": FP8_MAX, "SMALLEST": SMALLEST_AMAX}
COMPILE_SIGNATURES = (
    (
        _write_plain,
        {"keys": "*bf16", "host_slots": "*i32", "pages": "*bf16", "size": "i32:16", "BLOCK": 128},
        {"num_warps": 1},
    ),
    (
        _write_fp8,
        {"keys": "*bf16", "host_slots": "*i32", "values": "*fp8e4nv", "scales": "*fp32",
         "page_bytes": "i32:16", "PAGE": BLOCK_TOKENS, **_QUANTISE},
        {"num_warps": 1},
    ),
    (
        _quantise_query,
        {"query": "*bf16", "weights": "*fp32", "values": "*fp8e4nv", "folded": "*fp32",
         "heads": "i32:16", "BLOCK_HEADS": 16, **_QUANTISE},
    ),
)  # fmt: skip
