"""DeepGEMM's fp8 products; contracts in `kernels/reference/fp8_linear.py`."""

import torch
from torch import Tensor

from echokv.kernels.libraries import load_deep_gemm
from echokv.kernels.reference.fp8_linear import check_fp8_args
from echokv.kernels.triton.fp8_pairs import gate
from echokv.kernels.triton.fp8_product import quantise


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x [..., K] @ weight [N, K].T, both in e4m3 with their scales: [..., N]."""
    check_fp8_args(x, weight, scale)
    return _product(x, weight, scale)


def fp8_gate_up(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T) of weight [2 * I, K]: [..., I]; both are rounded to bf16."""
    check_fp8_args(x, weight, scale, gated=True)
    return gate(_product(x, weight, scale))


def _product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    rows = x.view(-1, x.shape[-1])
    out = torch.empty(rows.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        load_deep_gemm().fp8_gemm_nt(quantise(rows), (weight, scale), out)
    return out.view(*x.shape[:-1], weight.shape[0])
