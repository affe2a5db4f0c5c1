"""RMSNorm, alone and after a residual addition; float32 inside, the dtype of x outside."""

import torch
from torch import Tensor

from echokv.kernels.checks import FLOATS, check_tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension.

    Args:
        x: [T, D] float.
        weight: [D] float32.
        eps: added to the mean square.

    Returns:
        like x.
    """
    check_norm_args(x, weight)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, rounded to x's dtype, and its RMSNorm.

    Args:
        x: [T, D] float.
        delta: like x.
        weight: [D] float32.
        eps: added to the mean square.

    Returns:
        the sum and the normed sum, like x.
    """
    check_tensor("delta", delta, tuple(x.shape), x.dtype, device=x.device)
    total = x + delta
    return total, rms_norm(total, weight, eps)


def check_norm_args(x: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless `rms_norm` can take these."""
    check_tensor("x", x, (None, None), FLOATS)
    check_tensor("weight", weight, (x.shape[1],), torch.float32, device=x.device)
