"""Elementwise steps of the MLPs; contracts in `kernels/reference/gating.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.reference.gating import check_gating_args, check_sum_args
from echokv.kernels.triton.numerics import round_to

_BLOCK = 1024


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [T, D]."""
    check_gating_args(gate, up)
    rows, size = gate.shape
    out = gate.new_empty(rows, size)
    if gate.numel():
        _silu_mul[(triton.cdiv(size, _BLOCK), rows)](
            gate, up, out, size, gate.stride(0), up.stride(0), _BLOCK
        )
    return out


def add_rounded(total: Tensor, more: Tensor) -> Tensor:
    """total + more, both [T, D], in the dtype of more."""
    check_sum_args(total, more)
    out = torch.empty_like(more)
    if more.numel():
        _add_rounded[(triton.cdiv(more.numel(), _BLOCK),)](total, more, out, more.numel(), _BLOCK)
    return out


@triton.jit
def _add_rounded(total, more, out, count, BLOCK: tl.constexpr):
    """Program (piece)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    a = tl.load(total + at, mask=inside, other=0.0)
    b = tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, round_to(a + b, out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(
    gate,  # [T, size], rows gate_stride apart
    up,  # [T, size], rows up_stride apart
    out,  # [T, size] out
    size,
    gate_stride,
    up_stride,
    BLOCK: tl.constexpr,
):
    """Program (piece, row)."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    active = round_to(g * tl.sigmoid(g), out.dtype.element_ty).to(tl.float32)
    value = round_to(active * u, out.dtype.element_ty)
    tl.store(out + row * size + column, value, mask=inside)


COMPILE_SIGNATURES = (
    (
        _add_rounded,
        {"total": "*fp32", "more": "*bf16", "out": "*bf16", "count": "i32:16", "BLOCK": _BLOCK},
    ),
    (
        _silu_mul,
        {"gate": "*bf16", "up": "*bf16", "out": "*bf16", "size": "i32:16",
         "gate_stride": "i32:16", "up_stride": "i32:16", "BLOCK": _BLOCK},
    ),
)  # fmt: skip
