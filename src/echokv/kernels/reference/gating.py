"""Elementwise steps of the MLPs: the gate's activation, the sum of all experts."""

import torch
from torch import Tensor
from torch.nn import functional

from echokv.kernels.checks import FLOATS, check_rows, check_tensor


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, the activation rounded before the product.

    Args:
        gate: [T, D] float; rows at any distance.
        up: like gate.
    """
    check_gating_args(gate, up)
    return functional.silu(gate) * up


def add_rounded(total: Tensor, more: Tensor) -> Tensor:
    """total + more, summed in float32 and rounded once.

    Args:
        total: [T, D] float32.
        more: [T, D] float.

    Returns:
        [T, D] in the dtype of more.
    """
    check_sum_args(total, more)
    return (total + more.float()).to(more.dtype)


def check_gating_args(gate: Tensor, up: Tensor) -> None:
    """Raise ValueError unless `silu_mul` can take these."""
    check_rows("gate", gate, (None, None), FLOATS)
    check_rows("up", up, tuple(gate.shape), gate.dtype, device=gate.device)


def check_sum_args(total: Tensor, more: Tensor) -> None:
    """Raise ValueError unless `add_rounded` can take these."""
    check_tensor("total", total, (None, None), torch.float32)
    check_tensor("more", more, tuple(total.shape), FLOATS, device=total.device)
