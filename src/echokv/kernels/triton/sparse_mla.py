"""Sparse latent attention; contract in `kernels/reference/sparse_mla.py`, kernels in `mla_pieces`.

A token's rows are cut into pieces, which programs attend to beside each other and a second kernel
adds in order. Pieces depend on k alone, so a token's result is the same in any batch.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.reference.sparse_mla import check_mla_args
from echokv.kernels.triton.mla_pieces import add_pieces, attend_piece
from echokv.memory.formats import FP8_GROUP, RowFormat

_TOKENS_AT_ONCE = 32  # bounds the workspace: 2 MiB a token at 128 heads and k = 2048
_PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LOG2_E = 1.4426950408889634
_HOPPERS = 227 * 1024  # bytes of shared memory that a block can have
_AMPERES = 163 * 1024  # of an A100


@dataclass(frozen=True, kw_only=True)
class MlaTiles:
    """How the products are cut up."""

    heads: int  # of a program
    columns: int  # of a program's output
    rows: int  # of a step
    piece: int  # rows of a program; a multiple of that
    warps: int
    stages: int


def sparse_mla(
    query: Tensor, rows: Tensor, device_slots: Tensor, fmt: RowFormat, scale: float
) -> Tensor:
    """Attend query [T, H, latent + rope] to rows named by device_slots [T, k]: [T, H, latent]."""
    check_mla_args(query, rows, device_slots, fmt)
    tokens, heads, _ = query.shape
    out = torch.empty(tokens, heads, fmt.latent_dim, dtype=query.dtype, device=query.device)
    if tokens == 0 or device_slots.shape[1] == 0:
        return out.zero_()
    for first in range(0, tokens, _TOKENS_AT_ONCE):
        part = slice(first, first + _TOKENS_AT_ONCE)
        attend(query[part], rows, device_slots[part], fmt, scale, out[part])
    return out


def attend(
    query: Tensor,
    rows: Tensor,
    device_slots: Tensor,
    fmt: RowFormat,
    scale: float,
    out: Tensor,
) -> None:
    """`sparse_mla` of a few tokens into out."""
    tokens, heads, _ = query.shape
    k, device = device_slots.shape[1], query.device
    is_fp8 = fmt.name == "fp8_ds_mla"
    compute = _compute_dtype(query.dtype, torch.bfloat16 if is_fp8 else _PLAIN[fmt.name])
    tiles = mla_tiles(fmt.latent_dim, compute, _shared_bytes(device))
    values = rows.view(torch.float8_e4m3fn if is_fp8 else _PLAIN[fmt.name])
    ropes = rows.view(torch.bfloat16) if is_fp8 else values
    rope_at = fmt.latent_dim + (2 * fmt.latent_dim // FP8_GROUP - fmt.latent_dim // 2) * is_fp8
    unit = math.gcd(8, ropes.shape[1], rope_at)  # wide loads need to know that addresses are even
    piece = min(tiles.piece, max(tiles.rows, triton.next_power_of_2(k)))
    pieces = triton.cdiv(k, piece)
    # In the query's dtype: each is rounded as the result is, and fp32 would be most of the traffic.
    sums = query.new_empty(tokens, pieces, heads, fmt.latent_dim)
    tops, totals = torch.empty(2, tokens, pieces, heads, device=device).unbind()
    groups, head_blocks = (
        triton.cdiv(fmt.latent_dim, tiles.columns),
        triton.cdiv(heads, tiles.heads),
    )
    attend_piece[(groups * head_blocks, pieces, tokens)](
        query, values, rows.view(torch.float32), ropes, device_slots, sums, tops, totals,
        scale * _LOG2_E, heads, k, values.shape[1], fmt.row_bytes // 4, ropes.shape[1] // unit,
        rope_at // unit, unit, fmt.rope_dim, fmt.latent_dim,
        max(16, triton.next_power_of_2(fmt.rope_dim)), tiles.columns, FP8_GROUP, piece,
        tiles.heads, tiles.rows, is_fp8, compute, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    add_pieces[(heads, tokens)](
        sums, tops, totals, out, scale * _LOG2_E, heads, fmt.latent_dim, pieces,
        triton.next_power_of_2(pieces), triton.next_power_of_2(fmt.latent_dim),
    )  # fmt: skip


def mla_tiles(latent_dim: int, compute: tl.dtype, shared_bytes: int) -> MlaTiles:
    """Tiles for a latent of up to 512 values and so much shared memory a block.

    On Hopper they spill nothing, and were the fastest of those that were tried. With less shared
    memory they fit it, from 99 KB on; how fast they are there has not been measured.
    """
    if compute == tl.float32:
        return MlaTiles(heads=16, columns=128, rows=16, piece=256, warps=4, stages=1)
    whole = max(16, triton.next_power_of_2(latent_dim))
    if shared_bytes >= _HOPPERS:
        return MlaTiles(heads=64, columns=whole, rows=64, piece=128, warps=8, stages=2)
    if shared_bytes >= _AMPERES:
        return MlaTiles(heads=64, columns=whole, rows=32, piece=128, warps=8, stages=2)
    return MlaTiles(heads=16, columns=whole, rows=32, piece=128, warps=4, stages=2)


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return _HOPPERS
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return int(properties["max_shared_mem"])


def _compute_dtype(query: torch.dtype, rows: torch.dtype) -> tl.dtype:
    """bf16 products when both sides are bf16 (e4m3 is unpacked to it), else fp32."""
    return tl.bfloat16 if query == rows == torch.bfloat16 else tl.float32


def _signature(query: str, values: str, shared_bytes: int = _HOPPERS) -> tuple[object, ...]:
    compute = tl.bfloat16 if query == "*bf16" and values != "*fp32" else tl.float32
    tiles = mla_tiles(512, compute, shared_bytes)
    is_fp8 = values == "*fp8e4nv"
    signature = {
        "query": query,
        "values": values,
        "scales": "*fp32",
        "ropes": "*bf16" if is_fp8 else values,
        "device_slots": "*i32",
        "sums": query,
        "tops": "*fp32",
        "totals": "*fp32",
        "scale_log2": "fp32",
        **dict.fromkeys(("heads", "k", "row_values"), "i32:16"),
        "row_scales": "i32" if is_fp8 else "i32:16",  # 656 B are 164 fp32
        "row_ropes": "i32",
        "rope_at": "i32",
        "UNIT": 8,
        "ROPE_DIM": 64,
        "LATENT": 512,
        "ROPE": 64,
        "COLUMNS": tiles.columns,
        "GROUP": FP8_GROUP,
        "PIECE": tiles.piece,
        "HEADS": tiles.heads,
        "ROWS": tiles.rows,
        "IS_FP8": is_fp8,
        "DTYPE": compute,
    }
    return attend_piece, signature, {"num_warps": tiles.warps, "num_stages": tiles.stages}


COMPILE_SIGNATURES = (
    *(
        _signature(query, values)
        for query in ("*bf16", "*fp32")
        for values in ("*fp8e4nv", "*bf16", "*fp32")
    ),
    _signature("*bf16", "*bf16", _AMPERES),
    *(_signature("*bf16", values, 99 * 1024) for values in ("*fp8e4nv", "*bf16")),
    (
        add_pieces,
        {
            "sums": "*bf16",
            "tops": "*fp32",
            "totals": "*fp32",
            "out": "*bf16",
            "scale_log2": "fp32",
            "heads": "i32:16",
            "latent_dim": "i32:16",
            "PIECES": 16,
            "BLOCK_PIECES": 16,
            "BLOCK_LATENT": 512,
        },
    ),
)
