"""Block-quantised fp8 weights (DeepSeek's `weight_scale_inv`) to the compute dtype.

value = e4m3 * scale of its block; blocks are 128 x 128 in published checkpoints. Works band by
band, so that no float32 copy of a whole matrix is ever made.
"""

from torch import Tensor

from echokv.errors import ConfigError

MAX_BAND_ELEMENTS = 16 << 20
"""Most elements dequantised at once (64 MiB of float32)."""


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a matrix of that shape: one a block, the last ones may be ragged."""
    if len(shape) != 2:
        raise ConfigError(f"block-fp8 weights are matrices, not of shape {list(shape)}")
    return (-(-shape[0] // block[0]), -(-shape[1] // block[1]))


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
