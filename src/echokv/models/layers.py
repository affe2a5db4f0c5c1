"""The plain layers: weights in the compute dtype, norms in float32.

Parameters are created uninitialised on the current default device and never train; the loader
fills them (`models.weights`).
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from echokv.kernels.protocol import ModelKernels
from echokv.kernels.registry import reference_model_kernels

PLAIN = reference_model_kernels()
"""What modules run on that are built without a backend."""


def weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Stacked(nn.Module, ABC):
    """A module whose parameters hold several tensors of a checkpoint, or one of another shape."""

    @abstractmethod
    def places(self) -> dict[str, Tensor]:
        """Checkpoint names, relative to the module's, and views of the checkpoint's shapes."""


class Linear(nn.Module):
    """x [..., in_features] -> [..., out_features], no bias."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight(out_features, in_features, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply in the dtype of the weight, which x must have."""
        return functional.linear(x, self.weight)


class Embedding(nn.Module):
    """token ids [T] -> [T, dim]."""

    def __init__(self, num_embeddings: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight(num_embeddings, dim, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Look the rows up."""
        return functional.embedding(ids, self.weight)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; float32 inside, the dtype of x outside."""

    def __init__(self, dim: int, eps: float, ops: ModelKernels = PLAIN) -> None:
        super().__init__()
        self.weight = weight(dim, dtype=torch.float32)
        self._eps = eps
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [T, dim]."""
        return self._ops.rms_norm(x, self.weight, self._eps)

    def of_sum(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + delta (x where that is None), and the norm of it."""
        if delta is None:
            return x, self(x)
        return self._ops.add_rms_norm(x, delta, self.weight, self._eps)


class LayerNorm(nn.Module):
    """The parameters of a LayerNorm with bias; who holds it computes it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = weight(dim, dtype=torch.float32)
        self.bias = weight(dim, dtype=torch.float32)


class GatedMLP(Stacked):
    """down(silu(gate(x)) * up(x)): dense layers and shared experts."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        ops: ModelKernels = PLAIN,
    ) -> None:
        super().__init__()
        self._ops = ops
        self.gate_up_proj = weight(2 * intermediate_size, hidden_size, dtype=dtype)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden].

        One product on a GPU; two on a CPU, where an output's bits may depend on the shape.
        """
        if x.is_cuda:
            gate, up = functional.linear(x, self.gate_up_proj).chunk(2, -1)
        else:
            gate, up = (functional.linear(x, half) for half in self.gate_up_proj.chunk(2))
        out: Tensor = self.down_proj(self._ops.silu_mul(gate, up))
        return out

    def places(self) -> dict[str, Tensor]:
        """See `Stacked`."""
        gate, up = self.gate_up_proj.chunk(2)
        return {"gate_proj.weight": gate, "up_proj.weight": up}
