"""Products with block-quantised fp8 weights, activations quantised on the way (W8A8).

DeepSeek-V3's scheme (arXiv 2412.19437, section 3.3.2): weights in e4m3 with one scale a block of
128 x 128, activations in e4m3 with one scale a token and 128 columns; products are summed in fp32.
"""

import torch
from torch import Tensor
from torch.nn import functional

from echokv.kernels.checks import check_tensor

FP8_BLOCK = 128
"""Rows and columns of a weight that share a scale, and columns of an activation that do."""

FP8_MAX = 448.0
"""Largest finite e4m3 value."""

SMALLEST_AMAX = 1e-4
"""Magnitudes below this count as this when an activation's scale is chosen, as in `act_quant`."""


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x @ weight.T, both in e4m3 with their scales.

    Args:
        x: [..., K] bfloat16; K a multiple of 128.
        weight: [N, K] float8_e4m3fn.
        scale: [ceil(N / 128), K / 128] float32; a weight is its e4m3 value times its block's scale.

    Returns:
        [..., N] bfloat16.
    """
    check_fp8_args(x, weight, scale)
    values, scales = quantise_activations(x)
    product = functional.linear(dequantise(values, scales), dequantise_blocks(weight, scale))
    return product.to(x.dtype)


def fp8_gate_up(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T), with gate and up stacked in one weight.

    Args:
        x: [..., K] bfloat16; K a multiple of 128.
        weight: [2 * I, K] float8_e4m3fn, gate first; I a multiple of 128.
        scale: [2 * I / 128, K / 128] float32.

    Returns:
        [..., I] bfloat16, rounded once at the end.
    """
    check_fp8_args(x, weight, scale, gated=True)
    values, scales = quantise_activations(x)
    both = functional.linear(dequantise(values, scales), dequantise_blocks(weight, scale))
    gate, up = both.chunk(2, -1)
    return (functional.silu(gate) * up).to(x.dtype)


def quantise_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise groups of 128 columns, each with its own scale: max|x| / 448, no power of two.

    Args:
        x: [..., K] float, K a multiple of 128.

    Returns:
        [..., K] float8_e4m3fn and [..., K / 128] float32 scales.
    """
    groups = x.float().unflatten(-1, (-1, FP8_BLOCK))
    amax = groups.abs().amax(-1).clamp(min=SMALLEST_AMAX)
    limit = torch.full_like(amax, FP8_MAX)  # a scalar would be multiplied by a reciprocal
    values = (groups * (limit / amax)[..., None]).to(torch.float8_e4m3fn)
    return values.flatten(-2), amax / limit


def dequantise(values: Tensor, scales: Tensor) -> Tensor:
    """[..., K] e4m3 times [..., K / 128] scales, in float32."""
    groups: Tensor = values.float().unflatten(-1, (-1, FP8_BLOCK)) * scales[..., None]
    return groups.flatten(-2)


def dequantise_blocks(weight: Tensor, scale: Tensor) -> Tensor:
    """[N, K] e4m3 times the scales of its blocks, in float32."""
    rows = scale.repeat_interleave(FP8_BLOCK, 0)[: weight.shape[0]]
    return weight.float() * rows.repeat_interleave(FP8_BLOCK, 1)


def check_fp8_args(x: Tensor, weight: Tensor, scale: Tensor, *, gated: bool = False) -> None:
    """Raise ValueError unless `fp8_linear` (or `fp8_gate_up`) can take these."""
    check_tensor("weight", weight, (None, x.shape[-1]), torch.float8_e4m3fn, device=x.device)
    check_tensor("x", x.view(-1, x.shape[-1]), (None, x.shape[-1]), torch.bfloat16)
    rows, columns = weight.shape
    if columns % FP8_BLOCK or columns == 0:
        raise ValueError(f"fp8 products need columns in blocks of {FP8_BLOCK}, got {columns}")
    if gated and rows % (2 * FP8_BLOCK):
        raise ValueError(f"gate and up need {FP8_BLOCK} x n rows each, together they have {rows}")
    shape = (-(-rows // FP8_BLOCK), columns // FP8_BLOCK)
    check_tensor("scale", scale, shape, torch.float32, device=x.device)
