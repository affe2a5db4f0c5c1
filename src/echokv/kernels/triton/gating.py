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
    out = torch.empty_like(gate)
    if gate.numel():
        _silu_mul[(triton.cdiv(gate.numel(), _BLOCK),)](gate, up, out, gate.numel(), _BLOCK)
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
def _silu_mul(gate, up, out, count, BLOCK: tl.constexpr):
    """Program (piece)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    active = round_to(g * tl.sigmoid(g), out.dtype.element_ty).to(tl.float32)
    tl.store(out + at, round_to(active * u, out.dtype.element_ty), mask=inside)


COMPILE_SIGNATURES = (
    (
        _add_rounded,
        {"total": "*fp32", "more": "*bf16", "out": "*bf16", "count": "i32:16", "BLOCK": _BLOCK},
    ),
    (
        _silu_mul,
        {"gate": "*bf16", "up": "*bf16", "out": "*bf16", "count": "i32:16", "BLOCK": _BLOCK},
    ),
)
