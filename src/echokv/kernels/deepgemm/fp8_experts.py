"""Experts by DeepGEMM's grouped products; contract in `kernels/reference/fp8_experts.py`.

Few tokens use the masked layout, in which every expert has rows for all of them; many use the
contiguous one, in blocks of 128 rows of one expert each. In both, shapes depend on the number of
tokens alone and nothing waits for the device.
"""

import torch
from torch import Tensor

from echokv.kernels.libraries import load_deep_gemm
from echokv.kernels.reference.fp8_experts import check_experts_args
from echokv.kernels.triton.fp8_experts import combine, group_by_expert
from echokv.kernels.triton.fp8_pairs import Places, gate_pairs, place_masked, quantise_pairs

_MOST_MASKED = 64  # tokens
_BLOCK = 128  # rows of a tile, which are one expert's: all are written (DeepGEMM issue 268)


def fp8_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
) -> Tensor:
    """Weighted sum of the chosen experts' gated MLPs over x [T, H]: [T, H] float32.

    Gate and up are rounded to bfloat16 before silu.
    """
    check_experts_args(x, experts, weights, gate_up, gate_up_scale, down, down_scale)
    tokens, choices = experts.shape
    if tokens == 0:
        return x.new_empty(x.shape, dtype=torch.float32)
    layout: _Masked | _Contiguous = (
        _Masked(experts, down.shape[0])
        if tokens <= _MOST_MASKED
        else _Contiguous(experts, down.shape[0])
    )
    both = layout.product(quantise_pairs(x, layout.places, choices), gate_up, gate_up_scale)
    outputs = layout.product(gate_pairs(both, layout.places), down, down_scale)
    return combine(outputs, weights, layout.places.rows)


class _Masked:
    """A block of rows an expert, which every token fits; the product looks at those in use."""

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        self.places = place_masked(experts, num_experts, _BLOCK)
        self._expected = max(1, experts.numel() // num_experts)

    def product(self, x: tuple[Tensor, Tensor], weight: Tensor, scale: Tensor) -> Tensor:
        rows, columns = x[0].shape[1], weight.shape[1]
        out = torch.empty(
            weight.shape[0], rows, columns, dtype=torch.bfloat16, device=weight.device
        )
        load_deep_gemm().fp8_m_grouped_gemm_nt_masked(
            x, (weight, scale), out, self.places.counts, self._expected
        )
        return out


class _Contiguous:
    """Every expert's rows one after the other, padded to blocks."""

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        groups = group_by_expert(experts, num_experts, _BLOCK)
        self._experts = groups.experts.repeat_interleave(_BLOCK)
        self.places = Places(
            rows=groups.places, counts=None, experts=1, capacity=groups.pairs.shape[0]
        )

    def product(self, x: tuple[Tensor, Tensor], weight: Tensor, scale: Tensor) -> Tensor:
        values, scales = x[0][0], x[1][0]
        out = torch.empty(
            values.shape[0], weight.shape[1], dtype=torch.bfloat16, device=weight.device
        )
        load_deep_gemm().m_grouped_fp8_gemm_nt_contiguous(
            (values, scales), (weight, scale), out, self._experts
        )
        return out
