"""Above which score rows are surely selected; contract in `kernels/reference/score_bounds.py`.

One program a row, which looks at each score once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.reference.score_bounds import BINS, check_bounds_args

_PIECE = 4096


@triton.jit
def _score_bounds(
    scores,  # [T, width]
    context_lens,  # [T]
    request_rows,  # [T]
    shifts,  # [R]
    bounds,  # [T] out
    width,
    k,
    BINS: tl.constexpr,
    PIECE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(context_lens + row), width)
    shift = tl.load(shifts + tl.load(request_rows + row))
    counts = tl.zeros((BINS,), tl.int32)
    start = 0
    while start < length:
        position = start + tl.arange(0, PIECE)
        inside = position < length
        score = tl.load(scores + row * width + position, mask=inside, other=0.0)
        outside = PIECE - tl.sum(inside.to(tl.int32))  # they are counted as zeros, in one bin
        shifted = tl.where(inside, score - shift, 0.0)
        shifted = tl.where(shifted == 0.0, 0.0, shifted)
        shifted = tl.where(shifted != shifted, float("-inf"), shifted)
        bits = shifted.to(tl.uint32, bitcast=True)
        key = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
        counts += tl.histogram((key >> 24).to(tl.int32), BINS)
        counts -= tl.where(tl.arange(0, BINS) == BINS // 2, outside, 0)
        start += PIECE
    from_bin = tl.cumsum(counts, axis=0, reverse=True)  # scores in this bin and above
    reached = tl.sum((from_bin >= k).to(tl.int32))  # 1 + the bin of the k-th
    key = (tl.minimum(reached, BINS - 1).to(tl.uint32)) << 24
    bits = tl.where(key >> 31 != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    bound = bits.to(tl.float32, bitcast=True)
    bound = tl.where(reached == BINS, float("nan"), bound)
    tl.store(bounds + row, tl.where(reached == 0, float("-inf"), bound))


def score_bounds(
    scores: Tensor, context_lens: Tensor, request_rows: Tensor, shifts: Tensor, k: int
) -> Tensor:
    """The least shifted score that is surely selected, [T]; see `reference.score_bounds`."""
    check_bounds_args(scores, context_lens, request_rows, shifts, k)
    rows, width = scores.shape
    bounds = torch.empty(rows, dtype=torch.float32, device=scores.device)
    if rows:
        _score_bounds[(rows,)](
            scores, context_lens, request_rows, shifts, bounds, width, k, BINS, _PIECE, num_warps=8
        )
    return bounds


COMPILE_SIGNATURES = (
    (
        _score_bounds,
        {
            "scores": "*fp32",
            **dict.fromkeys(("context_lens", "request_rows"), "*i32"),
            **dict.fromkeys(("shifts", "bounds"), "*fp32"),
            "width": "i32:16",
            "k": "i32:16",
            "BINS": BINS,
            "PIECE": _PIECE,
        },
        {"num_warps": 8},
    ),
)
