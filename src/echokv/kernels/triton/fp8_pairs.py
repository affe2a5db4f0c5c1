"""(token, choice) pairs of a mixture of experts in the layouts of DeepGEMM's grouped products.

Each pair gets a place: a row of a buffer in which every expert has rows of its own, either a fixed
number each (masked layout, for few tokens) or as many blocks of 128 as it needs (contiguous). What
lies between is never initialised, and never read back.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.reference.fp8_linear import FP8_BLOCK, FP8_MAX, SMALLEST_AMAX
from echokv.kernels.triton.fp8_product import in_e4m3, silu
from echokv.kernels.triton.numerics import round_to

_CHUNK = 1024  # pairs looked at together
_BLOCKS = 8  # groups of 128 columns of one program
_GATE_COLUMNS = 1024


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where each pair's row is."""

    rows: Tensor  # [pairs] int32
    counts: Tensor | None  # [E] int32 rows in use of each expert (masked layout)
    experts: int  # buffers of `capacity` rows; 1 in the contiguous layout
    capacity: int  # rows of one


def place_masked(experts: Tensor, num_experts: int, capacity: int) -> Places:
    """Places for experts [T, k] int64, each of so many rows: at least T, all that it can get."""
    pairs, device = experts.numel(), experts.device
    rows = torch.empty(pairs, dtype=torch.int32, device=device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    _place_masked[(num_experts,)](
        experts, rows, counts, pairs, capacity,
        min(_CHUNK, max(16, triton.next_power_of_2(pairs))),
    )  # fmt: skip
    return Places(rows=rows, counts=counts, experts=num_experts, capacity=capacity)


def quantise_pairs(x: Tensor, places: Places, fan_out: int) -> tuple[Tensor, Tensor]:
    """Quantise x [R, K] into the layout; pair i reads row i // fan_out.

    Returns:
        [E, capacity, K] e4m3 and its scales [E, capacity, K / 128] float32, column by column.
    """
    return _into_layout(x, places, fan_out, gated=False)


def gate_pairs(both: Tensor, places: Places) -> tuple[Tensor, Tensor]:
    """silu(gate) * up of both [E, capacity, 2 * I], quantised as by `quantise_pairs`."""
    return _into_layout(both, places, 1, gated=True)


def _into_layout(x: Tensor, places: Places, fan_out: int, *, gated: bool) -> tuple[Tensor, Tensor]:
    width = x.shape[-1] // (2 if gated else 1)
    experts, capacity, blocks = places.experts, places.capacity, width // FP8_BLOCK
    stride = triton.cdiv(capacity, 4) * 4
    values = torch.empty(experts, capacity, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(experts, blocks, stride, dtype=torch.float32, device=x.device)
    _quantise_pairs[(places.rows.shape[0], triton.cdiv(blocks, _BLOCKS))](
        x, places.rows, values, scales, width, capacity, stride, fan_out, FP8_BLOCK, _BLOCKS,
        gated, FP8_MAX, SMALLEST_AMAX,
    )  # fmt: skip
    return values, scales.transpose(1, 2)[:, :capacity]


def gate(both: Tensor) -> Tensor:
    """silu(gate) * up of both [..., 2 * I]: [..., I]."""
    width = both.shape[-1] // 2
    out = both.new_empty(*both.shape[:-1], width)
    rows = both.numel() // both.shape[-1]
    if rows:
        grid = (rows, triton.cdiv(width, _GATE_COLUMNS))
        _gate[grid](both, out, width, _GATE_COLUMNS)
    return out


@triton.jit
def _place_masked(
    experts,  # [pairs] int64
    rows,  # [pairs] int32 out
    counts,  # [E] int32 out
    pairs,
    capacity,
    CHUNK: tl.constexpr,
):
    """Program (expert)."""
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    before = 0
    start = 0
    while start < pairs:
        inside = start + lane < pairs
        chosen = tl.load(experts + start + lane, mask=inside, other=-1).to(tl.int32)
        mine = (chosen == expert).to(tl.int32)
        place = expert * capacity + before + tl.cumsum(mine, axis=0) - mine
        tl.store(rows + start + lane, place, mask=mine != 0)
        before += tl.sum(mine)
        start += CHUNK
    tl.store(counts + expert, before)


@triton.jit
def _quantise_pairs(
    x,  # [R, width]; [E * capacity, 2 * width] gate and up where GATED
    places,  # [pairs]
    values,  # [E * capacity, width] e4m3 out
    scales,  # [E, width / BLOCK, stride] fp32 out
    width,
    capacity,
    stride,
    fan_out,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    GATED: tl.constexpr,
    FP8_LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """Program (pair, some groups of columns)."""
    pair = tl.program_id(0)
    place = tl.load(places + pair).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < width
    if GATED:
        row = x + place * 2 * width
        up = tl.load(row + width + column, mask=inside, other=0.0).to(tl.float32)
        part = silu(tl.load(row + column, mask=inside, other=0.0).to(tl.float32)) * up
        part = round_to(part, tl.bfloat16)
    else:
        row = x + (pair // fan_out).to(tl.int64) * width
        part = tl.load(row + column, mask=inside, other=0.0)
    codes, scale = in_e4m3(part, FP8_LIMIT, SMALLEST)
    tl.store(values + place * width + column, codes, mask=inside)
    at = (place // capacity * (width // BLOCK) + block) * stride + place % capacity
    tl.store(scales + at, scale, mask=block < width // BLOCK)


@triton.jit
def _gate(
    both,  # [R, 2 * width]
    out,  # [R, width]
    width,
    COLUMNS: tl.constexpr,
):
    """Program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    at = both + row * 2 * width + column
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    part = silu(tl.load(at, mask=inside, other=0.0).to(tl.float32)) * up
    tl.store(out + row * width + column, round_to(part, out.dtype.element_ty), mask=inside)


_QUANTISE = {"BLOCK": FP8_BLOCK, "BLOCKS": _BLOCKS, "FP8_LIMIT": FP8_MAX, "SMALLEST": SMALLEST_AMAX}
COMPILE_SIGNATURES = (
    (
        _place_masked,
        {
            "experts": "*i64",
            "rows": "*i32",
            "counts": "*i32",
            "pairs": "i32",
            "capacity": "i32",
            "CHUNK": _CHUNK,
        },
    ),
    *(
        (
            _quantise_pairs,
            {
                "x": "*bf16",
                "places": "*i32",
                "values": "*fp8e4nv",
                "scales": "*fp32",
                "width": "i32:16",
                **dict.fromkeys(("capacity", "stride", "fan_out"), "i32"),
                **_QUANTISE,
                "GATED": gated,
            },
        )
        for gated in (False, True)
    ),
    (_gate, {"both": "*bf16", "out": "*bf16", "width": "i32:16", "COLUMNS": _GATE_COLUMNS}),
)
