"""The plain parts: projections, norm, rotary position embedding."""

import torch
from torch import Tensor, nn
from torch.nn import functional

Angles = tuple[Tensor, Tensor]
EPS = 1e-6


def matrix(*shape: int, gain: float = 1.0) -> nn.Parameter:
    """Random, its outputs about `gain` times as large as its inputs."""
    return nn.Parameter(torch.randn(*shape) * gain * shape[-1] ** -0.5)


class Linear(nn.Module):
    """[..., in] -> [..., out]."""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = matrix(outputs, inputs, gain=gain)

    def forward(self, x: Tensor) -> Tensor:
        """No bias."""
        return functional.linear(x, self.weight)


class RMSNorm(nn.Module):
    """Float32 inside, the dtype of x outside."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Over the last dimension."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * self.weight).to(
            x.dtype
        )


def rotate_interleaved(x: Tensor, angles: Angles) -> Tensor:
    """Pairs (0, 1), (2, 3), ... of x [N, ..., D] by angles [N, D / 2]."""
    cos, sin = (a.view(a.shape[0], *[1] * (x.dim() - 2), a.shape[1]) for a in angles)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


def rotate_half(x: Tensor, angles: Angles) -> Tensor:
    """Pairs (0, D / 2), (1, D / 2 + 1), ..."""
    cos, sin = (a.view(a.shape[0], *[1] * (x.dim() - 2), a.shape[1]) for a in angles)
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
