"""Eviction priorities from one selection's index scores: one program a row."""

import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.cache_args import SCORE_BITS, SCORE_LEVELS, check_priorities


@triton.jit
def _score_priorities(
    clock,
    scores,  # [T, k]
    host_slots,  # [T, k]
    priorities,  # [T, k] out
    topk,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    index = tl.program_id(0).to(tl.int64) * topk + column
    slot = tl.load(host_slots + index, mask=column < topk, other=-1)
    chosen = slot >= 0
    score = tl.load(scores + index, mask=chosen, other=0.0)
    low = tl.min(tl.where(chosen, score, float("inf")))
    high = tl.max(tl.where(chosen, score, float("-inf")))
    spread = (high - low) + tl.zeros([BLOCK], tl.float32)
    place = tl.div_rn(score - low, tl.where(spread > 0, spread, 1.0))
    place = tl.where((spread > 0) & (place > 0), place, 0.0)  # no NaN passes either test
    level = 1 + tl.minimum(place * LEVELS, LEVELS - 1.0).to(tl.int32)
    level = tl.where(chosen, level, 0)
    tl.store(priorities + index, (tl.load(clock) << BITS) + level, mask=column < topk)


def score_priorities(clock: Tensor, scores: Tensor, host_slots: Tensor, priorities: Tensor) -> None:
    """The step, then the place of the score in its row; see `reference.score_priorities`."""
    check_priorities(clock, scores, host_slots, priorities)
    rows, topk = host_slots.shape
    if rows == 0 or topk == 0:
        return
    _score_priorities[(rows,)](
        clock,
        scores,
        host_slots,
        priorities,
        topk,
        BITS=SCORE_BITS,
        LEVELS=SCORE_LEVELS,
        BLOCK=triton.next_power_of_2(topk),
    )


COMPILE_SIGNATURES = (
    (
        _score_priorities,
        {
            "clock": "*i32",
            "scores": "*fp32",
            "host_slots": "*i32",
            "priorities": "*i32",
            "topk": "i32",
            "BITS": SCORE_BITS,
            "LEVELS": SCORE_LEVELS,
            "BLOCK": 2048,
        },
    ),
)
