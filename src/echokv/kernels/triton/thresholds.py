"""What a step teaches about the next; contract in `kernels/reference/thresholds.py`."""

import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.prefetch_args import (
    EMA_ALPHA,
    TURN_OFF_BELOW,
    TURN_ON_FROM,
    USEFULNESS_ALPHA,
    check_learn_args,
)


@triton.jit
def _is_finite(x):
    return (x == x) & (tl.abs(x) < float("inf"))


@triton.jit
def _update_thresholds(
    request_slots,  # [T]
    kth_scores,  # [T]
    candidate_scores,  # [T, most]
    num_candidates,  # [T]
    thresholds,  # [S]
    usefulness,  # [S]
    enabled,  # [S]
    most,
    ALPHA: tl.constexpr,
    USEFUL: tl.constexpr,
    OFF_BELOW: tl.constexpr,
    ON_FROM: tl.constexpr,
    MOST: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(request_slots + row)
    if slot >= 0:
        kth = tl.load(kth_scores + row)
        old = tl.load(thresholds + slot)
        new = tl.where(_is_finite(old), ALPHA * old + (1 - ALPHA) * kth, kth)
        tl.store(thresholds + slot, tl.where(_is_finite(kth), new, float("inf")))
        issued = tl.load(num_candidates + row)
        if issued > 0:
            column = tl.arange(0, MOST)
            score = tl.load(
                candidate_scores + row * most + column, mask=column < issued, other=float("-inf")
            )
            reached = tl.sum(((column < issued) & (score >= kth)).to(tl.int32))
            share = tl.div_rn(reached.to(tl.float32), issued.to(tl.float32))
            after = USEFUL * tl.load(usefulness + slot) + (1 - USEFUL) * share
            tl.store(usefulness + slot, after)
            is_on = tl.where(after < OFF_BELOW, 0, tl.load(enabled + slot))
            tl.store(enabled + slot, tl.where(after >= ON_FROM, 1, is_on))


def update_thresholds(
    request_slots: Tensor,
    kth_scores: Tensor,
    candidate_scores: Tensor,
    num_candidates: Tensor,
    thresholds: Tensor,
    usefulness: Tensor,
    enabled: Tensor,
) -> None:
    """Learn from the true k-th scores; see `reference.update_thresholds`."""
    check_learn_args(
        request_slots, kth_scores, candidate_scores, num_candidates, thresholds, usefulness, enabled
    )
    rows, most = candidate_scores.shape
    if rows == 0:
        return
    _update_thresholds[(rows,)](
        request_slots, kth_scores, candidate_scores, num_candidates, thresholds, usefulness,
        enabled, most, ALPHA=EMA_ALPHA, USEFUL=USEFULNESS_ALPHA, OFF_BELOW=TURN_OFF_BELOW,
        ON_FROM=TURN_ON_FROM, MOST=triton.next_power_of_2(most),
    )  # fmt: skip


COMPILE_SIGNATURES = (
    (
        _update_thresholds,
        {
            "request_slots": "*i32",
            "kth_scores": "*fp32",
            "candidate_scores": "*fp32",
            "num_candidates": "*i32",
            "thresholds": "*fp32",
            "usefulness": "*fp32",
            "enabled": "*i32",
            "most": "i32",
            "ALPHA": EMA_ALPHA,
            "USEFUL": USEFULNESS_ALPHA,
            "OFF_BELOW": TURN_OFF_BELOW,
            "ON_FROM": TURN_ON_FROM,
            "MOST": 512,
        },
    ),
)
