"""Angles of the rotary position embedding with DeepSeek's YaRN; `kernels/*/rotary.py` rotates.

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
