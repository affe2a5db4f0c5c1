"""Rotary position embedding with DeepSeek's YaRN, in both pairings of dimensions.

Source: YaRN (arXiv 2309.00071) with the correction range as DeepSeek-V3.2's inference code has it;
cos and sin carry mscale / mscale_all_dim as DeepSeek's published modelling code does (1 for V3.2).
"""

import math

import torch
from torch import Tensor

from echokv.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """Radians a token for each pair of dimensions.

    Under YaRN, pairs that turn more than beta_fast times within the original context keep their
    frequency, those that turn less than beta_slow times are slowed by `factor`, with a linear ramp
    over the pairs between.

    Args:
        rope: theta and YaRN's parameters.
        dim: dimensions that rotate; even.

    Returns:
        [dim / 2] float32.
    """
    plain = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if not rope.is_yarn:
        return plain

    def pair_that_turns(times: float) -> float:
        wavelength = rope.original_max_position_embeddings / (times * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(rope.beta_slow)), dim - 1)
    width = (high - low) or 0.001  # a step instead of a ramp
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / rope.factor * (1 - kept) + plain * kept


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


class Rope:
    """Computes cos and sin of a pass once, for every layer and for the indexer.

    Args:
        rope: theta and YaRN's parameters.
        dim: dimensions that rotate.
        device: where positions will be.
    """

    def __init__(self, rope: RopeConfig, dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, dim).to(device)
        self._magnitude = 1.0
        if rope.is_yarn:
            self._magnitude = _mscale(rope.factor, rope.mscale) / _mscale(
                rope.factor, rope.mscale_all_dim
            )

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every pair's angle.

        Args:
            positions: [T] int32.

        Returns:
            two tensors [T, dim / 2] float32.
        """
        angles = positions.float()[:, None] * self._frequencies
        return angles.cos() * self._magnitude, angles.sin() * self._magnitude


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (x0, x1), (x2, x3), ...; each stays where it was. Computed in float32.

    Args:
        x: [T, ..., dim].
        cos: [T, dim / 2] float32.
        sin: likewise.

    Returns:
        like x.
    """
    cos, sin = _broadcast(cos, x), _broadcast(sin, x)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (x0, x[dim/2]), (x1, x[dim/2 + 1]), ...; as `rotate_interleaved` otherwise."""
    cos, sin = _broadcast(cos, x), _broadcast(sin, x)
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def _broadcast(table: Tensor, x: Tensor) -> Tensor:
    """[T, dim / 2] with as many middle dimensions of 1 as x has."""
    return table.view(table.shape[0], *[1] * (x.dim() - 2), table.shape[1])
