"""Products in float32 whatever the activations are: the router's and the index heads' weights."""

import torch
from torch import Tensor
from torch.nn import functional

from echokv.kernels.checks import FLOATS, check_tensor


def wide_linear(x: Tensor, weight: Tensor, factor: float) -> Tensor:
    """x @ weight.T * factor, in float32 throughout.

    Args:
        x: [T, K] float.
        weight: [N, K] float32.
        factor: on the result.

    Returns:
        [T, N] float32.
    """
    check_wide_args(x, weight)
    return functional.linear(x.float(), weight) * factor


def check_wide_args(x: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless `wide_linear` can take these."""
    check_tensor("x", x, (None, None), FLOATS)
    check_tensor("weight", weight, (None, x.shape[1]), torch.float32, device=x.device)
