"""Products in float32 of few outputs; contract in `kernels/reference/wide_linear.py`.

A program gives a few tokens one output: with 32 to 256 outputs that is enough programs to read the
weights at once, and nothing is split or summed twice. cuBLAS does the same in three launches, and
better where there are many tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.reference import wide_linear as reference
from echokv.kernels.reference.wide_linear import check_wide_args

_MOST_TOKENS = 64
_TOKENS = 4  # of one program
_COLUMNS = 1024  # read at once
_WHOLE_ROW = 8192  # columns up to which a program of one token reads all at once


def wide_linear(x: Tensor, weight: Tensor, factor: float) -> Tensor:
    """x [T, K] @ weight [N, K].T * factor."""
    check_wide_args(x, weight)
    tokens, size = x.shape
    if not 0 < tokens <= _MOST_TOKENS:
        return reference.wide_linear(x, weight, factor)
    out = torch.empty(tokens, weight.shape[0], dtype=torch.float32, device=x.device)
    at_once, columns, warps = _TOKENS, _COLUMNS, 8
    if tokens == 1 and size <= _WHOLE_ROW:
        at_once, columns, warps = 1, triton.next_power_of_2(size), 16
    _wide_linear[(weight.shape[0], triton.cdiv(tokens, at_once))](
        x, weight, out, tokens, weight.shape[0], factor, size, at_once, columns, num_warps=warps
    )
    return out


@triton.jit
def _wide_linear(
    x,  # [T, SIZE]
    weight,  # [outputs, SIZE]
    out,  # [T, outputs]
    tokens,
    outputs,
    factor,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (output, block of tokens)."""
    output = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    sums = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for start in tl.static_range(0, SIZE, COLUMNS):  # unrolled: all loads go out at once
        inside = start + column < SIZE
        w = tl.load(weight + output.to(tl.int64) * SIZE + start + column, mask=inside, other=0.0)
        at = token[:, None].to(tl.int64) * SIZE + start + column[None, :]
        mask = (token[:, None] < tokens) & inside[None, :]
        sums += tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * w[None, :]
    total = tl.sum(sums, axis=1) * factor
    tl.store(out + token.to(tl.int64) * outputs + output, total, mask=token < tokens)


COMPILE_SIGNATURES = tuple(
    (
        _wide_linear,
        {"x": "*bf16", "weight": "*fp32", "out": "*fp32", "tokens": "i32", "outputs": "i32:16",
         "factor": "fp32", "SIZE": 7168, "TOKENS": tokens, "COLUMNS": columns},
        {"num_warps": warps},
    )
    for tokens, columns, warps in ((_TOKENS, _COLUMNS, 8), (1, _WHOLE_ROW, 16))
)  # fmt: skip
