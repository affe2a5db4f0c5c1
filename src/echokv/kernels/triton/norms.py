"""RMSNorm, alone and after a residual addition; contracts in `kernels/reference/norms.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.checks import check_tensor
from echokv.kernels.reference.norms import check_norm_args
from echokv.kernels.triton.numerics import round_to


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, D] / rms(x) * weight."""
    check_norm_args(x, weight)
    out = torch.empty_like(x)
    if x.numel():
        _rms_norm[(x.shape[0],)](x, x, weight, x, out, *_sizes(x, eps), False, **_options(x))
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta and its RMSNorm."""
    check_norm_args(x, weight)
    check_tensor("delta", delta, tuple(x.shape), x.dtype, device=x.device)
    total, out = torch.empty_like(x), torch.empty_like(x)
    if x.numel():
        _rms_norm[(x.shape[0],)](x, delta, weight, total, out, *_sizes(x, eps), True, **_options(x))
    return total, out


def _sizes(x: Tensor, eps: float) -> tuple[int, float, int]:
    return x.shape[1], eps, triton.next_power_of_2(x.shape[1])


def _options(x: Tensor) -> dict[str, int]:
    return {"num_warps": 8 if x.shape[1] > 2048 else 4}


@triton.jit
def _rms_norm(
    x,  # [T, size]
    delta,  # [T, size]
    weight,  # [size]
    total,  # [T, size] out
    out,  # [T, size] out
    size,
    eps,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    at = row * size + column
    w = tl.load(weight + column, mask=inside, other=0.0)  # on its way while the sum is made
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        rounded = round_to(value, out.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / size + eps)
    tl.store(out + at, round_to(value * scale * w, out.dtype.element_ty), mask=inside)


def _signature(has_delta: bool) -> tuple[object, ...]:
    rows = dict.fromkeys(("x", "delta", "total", "out"), "*bf16")
    return (
        _rms_norm,
        {"x": "*bf16", "delta": "*bf16", "weight": "*fp32", **rows, "size": "i32:16",
         "eps": "fp32", "BLOCK": 8192, "HAS_DELTA": has_delta},
        {"num_warps": 8},
    )  # fmt: skip


COMPILE_SIGNATURES = (_signature(False), _signature(True))
