"""Layers whose weights stay in block-scaled fp8, as the checkpoint stores them.

A scale stands beside its weight, under the checkpoint's name for it. Gate and up are stacked, so
that one product gives both; the loader fills the halves (`places`).
"""

import torch
from torch import Tensor, nn

from echokv.kernels.protocol import Fp8Kernels
from echokv.kernels.reference.fp8_linear import FP8_BLOCK
from echokv.models.layers import Stacked, weight

_SCALE = "weight_scale_inv"


def fp8_weight(*shape: int) -> tuple[nn.Parameter, nn.Parameter]:
    """An uninitialised weight [..., N, K] in e4m3, and its scales [..., N / 128, K / 128]."""
    *stack, rows, columns = shape
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    return (
        weight(*shape, dtype=torch.float8_e4m3fn),
        weight(*stack, *blocks, dtype=torch.float32),
    )


class Fp8Linear(nn.Module):
    """x [..., in_features] bf16 -> [..., out_features] bf16, no bias.

    Args:
        in_features: a multiple of 128.
        out_features: any.
        kernels: what multiplies; None in a model that never runs.
    """

    def __init__(self, in_features: int, out_features: int, kernels: Fp8Kernels | None) -> None:
        super().__init__()
        self.weight, self.weight_scale_inv = fp8_weight(out_features, in_features)
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """Quantise x and multiply."""
        assert self._kernels is not None, "built to be counted"
        return self._kernels.fp8_linear(x, self.weight, self.weight_scale_inv)


class Fp8GatedMLP(Stacked):
    """down(silu(gate(x)) * up(x)): dense layers and shared experts. Sizes are multiples of 128."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, kernels: Fp8Kernels | None
    ) -> None:
        super().__init__()
        self.gate_up_proj, self.gate_up_scale = fp8_weight(2 * intermediate_size, hidden_size)
        self.down_proj, self.down_scale = fp8_weight(hidden_size, intermediate_size)
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        assert self._kernels is not None, "built to be counted"
        inner = self._kernels.fp8_gate_up(x, self.gate_up_proj, self.gate_up_scale)
        return self._kernels.fp8_linear(inner, self.down_proj, self.down_scale)

    def places(self) -> dict[str, Tensor]:
        """See `Stacked`."""
        return _gated_places(self.gate_up_proj, self.gate_up_scale, self.down_proj, self.down_scale)


class Fp8Experts(Stacked):
    """Every routed expert's gated MLP, stacked. Sizes are multiples of 128."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        kernels: Fp8Kernels | None,
    ) -> None:
        super().__init__()
        inner = intermediate_size
        self.gate_up_proj, self.gate_up_scale = fp8_weight(num_experts, 2 * inner, hidden_size)
        self.down_proj, self.down_scale = fp8_weight(num_experts, hidden_size, inner)
        self._kernels = kernels

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """See `moe.Experts.forward`; never waits for the device."""
        assert self._kernels is not None, "built to be counted"
        return self._kernels.fp8_experts(
            x,
            experts,
            weights,
            self.gate_up_proj,
            self.gate_up_scale,
            self.down_proj,
            self.down_scale,
        )

    def places(self) -> dict[str, Tensor]:
        """See `Stacked`."""
        stacks = (self.gate_up_proj, self.gate_up_scale, self.down_proj, self.down_scale)
        return {
            f"{number}.{name}": place
            for number, tensors in enumerate(zip(*stacks, strict=True))
            for name, place in _gated_places(*tensors).items()
        }


def _gated_places(
    gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor
) -> dict[str, Tensor]:
    gate, up = gate_up.chunk(2)
    gate_scale, up_scale = gate_up_scale.chunk(2)
    return {
        "gate_proj.weight": gate,
        f"gate_proj.{_SCALE}": gate_scale,
        "up_proj.weight": up,
        f"up_proj.{_SCALE}": up_scale,
        "down_proj.weight": down,
        f"down_proj.{_SCALE}": down_scale,
    }
