"""A mixture of experts over block-quantised fp8 weights; products as in `fp8_linear`."""

import torch
from torch import Tensor

from echokv.kernels.checks import check_tensor
from echokv.kernels.reference.fp8_linear import FP8_BLOCK, fp8_gate_up, fp8_linear


def fp8_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
) -> Tensor:
    """Sum over a token's experts of weight * down(silu(gate(x)) * up(x)).

    The inner activations and each expert's output are rounded to bfloat16; the outputs are summed
    in float32 in the order of the token's choices.

    Args:
        x: [T, H] bfloat16.
        experts: [T, k] int64 in [0, E), distinct in a row.
        weights: [T, k] float32.
        gate_up: [E, 2 * I, H] float8_e4m3fn, gate first; H and I multiples of 128.
        gate_up_scale: [E, 2 * I / 128, H / 128] float32.
        down: [E, H, I] float8_e4m3fn.
        down_scale: [E, H / 128, I / 128] float32.

    Returns:
        [T, H] float32.
    """
    check_experts_args(x, experts, weights, gate_up, gate_up_scale, down, down_scale)
    out = torch.zeros(*experts.shape, x.shape[1], dtype=x.dtype, device=x.device)
    for expert in experts.unique().tolist():
        tokens, choices = (experts == expert).nonzero(as_tuple=True)
        inner = fp8_gate_up(x[tokens], gate_up[expert], gate_up_scale[expert])
        out[tokens, choices] = fp8_linear(inner, down[expert], down_scale[expert])
    return combine(out, weights)


def combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """[T, k, H] expert outputs times [T, k] weights, summed in float32 in order: [T, H]."""
    total = outputs.new_zeros(outputs.shape[0], outputs.shape[2], dtype=torch.float32)
    for choice in range(outputs.shape[1]):
        total += weights[:, choice, None] * outputs[:, choice].float()
    return total


def check_experts_args(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
) -> None:
    """Raise ValueError unless `fp8_experts` can take these."""
    device, e4m3 = x.device, torch.float8_e4m3fn
    check_tensor("x", x, (None, None), torch.bfloat16)
    check_tensor("experts", experts, (x.shape[0], None), torch.int64, device=device)
    check_tensor("weights", weights, tuple(experts.shape), torch.float32, device=device)
    check_tensor("down", down, (None, x.shape[1], None), e4m3, device=device)
    number, hidden, inner = down.shape
    check_tensor("gate_up", gate_up, (number, 2 * inner, hidden), e4m3, device=device)
    if hidden % FP8_BLOCK or inner % FP8_BLOCK:
        raise ValueError(
            f"fp8 experts need sizes in blocks of {FP8_BLOCK}, got {hidden} and {inner}"
        )
    blocks, inner_blocks = hidden // FP8_BLOCK, inner // FP8_BLOCK
    for name, scale, shape in (
        ("gate_up_scale", gate_up_scale, (number, 2 * inner_blocks, blocks)),
        ("down_scale", down_scale, (number, blocks, inner_blocks)),
    ):
        check_tensor(name, scale, shape, torch.float32, device=device)
