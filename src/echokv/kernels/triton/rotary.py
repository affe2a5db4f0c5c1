"""Rotary embedding of queries; contract in `kernels/reference/rotary.py`."""

import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.reference.rotary import check_rotate_args
from echokv.kernels.triton.numerics import round_to

_HEADS = 16  # of one program


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, interleaved: bool) -> None:
    """Rotate the first dimensions of x [T, H, D] into out, which may be x, and copy the others."""
    check_rotate_args(x, cos, sin, out)
    tokens, heads, dim = x.shape
    half = cos.shape[1]
    if x.numel() == 0:
        return
    rest = 0 if x.data_ptr() == out.data_ptr() else dim - 2 * half
    _rotate[(tokens, triton.cdiv(heads, _HEADS))](
        x, cos, sin, out, heads, half, rest, x.stride(0), x.stride(1), out.stride(0),
        out.stride(1), _HEADS, triton.next_power_of_2(half),
        triton.next_power_of_2(rest) if rest else 0, interleaved, num_warps=1,
    )  # fmt: skip


@triton.jit
def rotate_pairs(at, target, cos, sin, pair, mask, half, INTERLEAVED: tl.constexpr):
    """Load pairs of values at `at`, turn them by angles that broadcast, and store them.

    `pair` are the numbers of the pairs; at and target point to where the rotated part begins.
    """
    first, second = pair, pair + half
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    a = tl.load(at + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + second, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + first, round_to(a * cos - b * sin, target.dtype.element_ty), mask=mask)
    tl.store(target + second, round_to(b * cos + a * sin, target.dtype.element_ty), mask=mask)


@triton.jit
def _rotate(
    x,  # [T, H, 2 * half + rest]
    cos,  # [T, half]
    sin,  # [T, half]
    out,  # [T, H, 2 * half + rest]
    heads,
    half,
    rest,
    x_token,  # strides
    x_head,
    out_token,
    out_head,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,  # 0: nothing to copy
    INTERLEAVED: tl.constexpr,
):
    """Program (token, block of heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    c = tl.load(cos + token * half + pair, mask=pair < half, other=0.0)
    s = tl.load(sin + token * half + pair, mask=pair < half, other=0.0)
    mask = (head < heads) & (pair < half)
    at = x + token * x_token + head * x_head
    target = out + token * out_token + head * out_head
    rotate_pairs(at, target, c, s, pair, mask, half, INTERLEAVED)
    if REST > 0:
        column = tl.arange(0, REST)[None, :]
        mask = (head < heads) & (column < rest)
        tl.store(target + 2 * half + column, tl.load(at + 2 * half + column, mask=mask), mask=mask)


COMPILE_SIGNATURES = tuple(
    (
        _rotate,
        {"x": "*bf16", "cos": "*fp32", "sin": "*fp32", "out": "*bf16", "heads": "i32:16",
         "half": "i32:16", "rest": "i32:16", "x_token": "i32:16", "x_head": "i32:16",
         "out_token": "i32:16", "out_head": "i32:16", "HEADS": _HEADS, "PAIRS": 32, "REST": rest,
         "INTERLEAVED": interleaved},
        {"num_warps": 1},
    )
    for interleaved, rest in ((False, 64), (True, 64), (True, 0))
)  # fmt: skip
