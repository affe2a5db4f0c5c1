"""Block-quantised fp8 weights (DeepSeek's `weight_scale_inv`) to the compute dtype.

value = e4m3 * scale of its block; blocks are 128 x 128 in published checkpoints. Works band by
band, so that no float32 copy of a whole matrix is ever made.
"""

import torch
from torch import Tensor
from torch.nn import functional

from echokv.kernels.reference.fp8_linear import FP8_MAX, SMALLEST_AMAX

MAX_BAND_ELEMENTS = 16 << 20
"""Most elements dequantised at once (64 MiB of float32)."""


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of a matrix's scales: one a block; the blocks at its far edges may be ragged."""
    return tuple(-(-size // length) for size, length in zip(shape, block, strict=True))


def quantise_blocks(matrix: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A matrix [N, K] as e4m3, and the float32 scales of its blocks: largest magnitude / 448."""
    rows, columns = matrix.shape
    padded = functional.pad(matrix.float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1]))  # [n, 128, k, 128]
    scales = blocks.abs().amax((1, 3)).clamp(min=SMALLEST_AMAX) / FP8_MAX
    values = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return values.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scales


def dequantise_into(target: Tensor, values: Tensor, scales: Tensor, block: tuple[int, int]) -> None:
    """Write values * scales into target, on target's device and in its dtype.

    Args:
        target: [N, K] float, any strides.
        values: [N, K] float8_e4m3fn.
        scales: [ceil(N / block[0]), ceil(K / block[1])] float.
        block: rows and columns that share a scale.
    """
    rows, columns = values.shape
    scales = scales.to(target.device).float()
    bands = max(1, MAX_BAND_ELEMENTS // (block[0] * columns))  # block rows at once
    for first in range(0, scales.shape[0], bands):
        start, end = first * block[0], min((first + bands) * block[0], rows)
        spread = scales[first : first + bands].repeat_interleave(block[0], 0)[: end - start]
        spread = spread.repeat_interleave(block[1], 1)[:, :columns]
        target[start:end] = values[start:end].to(target.device).float() * spread
