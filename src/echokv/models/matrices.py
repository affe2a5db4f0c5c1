"""How a model's matrices are kept and multiplied: in the compute dtype, or in fp8 as stored.

DeepSeek's checkpoints store most matrices in e4m3 with a scale a block. Where a backend multiplies
those, they stay as they are: half the bytes of bf16 to hold and to read. Modules ask here for their
matrices; norms, embeddings, the router and lm_head are never in fp8.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from echokv.kernels.protocol import Fp8Kernels, ModelKernels
from echokv.kernels.reference.fp8_linear import FP8_BLOCK
from echokv.models.fp8 import Fp8GatedMLP, Fp8Linear
from echokv.models.layers import PLAIN, GatedMLP, Linear


def everything(name: str) -> bool:
    """Every matrix that may be stored in fp8 is."""
    return True


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """What decides the class of each matrix; `prefix` is where in the checkpoint one stands."""

    dtype: torch.dtype  # of activations, and of matrices that are not in fp8
    token_tile: int | None = None  # `Kernels.token_tile`
    keep_fp8: bool = False
    kernels: Fp8Kernels | None = None  # None with keep_fp8: a model that is only counted
    is_fp8: Callable[[str], bool] = everything  # whether a weight of that name is stored in fp8
    prefix: str = "model."
    ops: ModelKernels = field(default_factory=lambda: PLAIN)  # what stands between the matrices

    def under(self, name: str) -> "Matrices":
        """The same for a submodule."""
        return dataclasses.replace(self, prefix=f"{self.prefix}{name}.")

    def stay_fp8(self, *names: str, sizes: tuple[int, ...]) -> bool:
        """Whether some matrices are all stored in fp8 and their sizes, of blocks of 128, allow it.

        Args:
            names: relative to the prefix.
            sizes: dimensions that must be whole blocks.
        """
        return (
            self.keep_fp8
            and not any(size % FP8_BLOCK for size in sizes)
            and all(self.is_fp8(f"{self.prefix}{name}.weight") for name in names)
        )

    def linear(self, name: str, in_features: int, out_features: int) -> nn.Module:
        """The matrix of that name: x [..., in_features] -> [..., out_features]."""
        if self.stay_fp8(name, sizes=(in_features,)):
            return Fp8Linear(in_features, out_features, self.kernels)
        return Linear(in_features, out_features, self.dtype)

    def gated_mlp(self, hidden_size: int, intermediate_size: int) -> nn.Module:
        """The gated MLP at the prefix."""
        names = ("gate_proj", "up_proj", "down_proj")
        if self.stay_fp8(*names, sizes=(hidden_size, intermediate_size)):
            return Fp8GatedMLP(hidden_size, intermediate_size, self.kernels)
        return GatedMLP(hidden_size, intermediate_size, self.dtype, self.ops)
