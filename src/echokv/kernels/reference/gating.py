"""The activation of a gated MLP."""

from torch import Tensor
from torch.nn import functional

from echokv.kernels.checks import FLOATS, check_tensor


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, the activation rounded before the product.

    Args:
        gate: [T, D] float.
        up: like gate.
    """
    check_gating_args(gate, up)
    return functional.silu(gate) * up


def check_gating_args(gate: Tensor, up: Tensor) -> None:
    """Raise ValueError unless `silu_mul` can take these."""
    check_tensor("gate", gate, (None, None), FLOATS)
    check_tensor("up", up, tuple(gate.shape), gate.dtype, device=gate.device)
