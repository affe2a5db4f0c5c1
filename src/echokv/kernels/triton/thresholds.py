"""What a step teaches about the next; contract in `kernels/reference/thresholds.py`."""

import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.prefetch_args import (
    EMA_ALPHA,
    NO_LIMIT,
    PROBES,
    RESTS,
    ROWS_FOR_A_USEFUL_ONE,
    USEFUL_ALPHA,
    check_learn_args,
)


@triton.jit
def _is_finite(x):
    return (x == x) & (tl.abs(x) < float("inf"))


@triton.jit
def _moved(average, count, ALPHA: tl.constexpr):
    """An average after a step with such a count."""
    count = count.to(tl.float32)
    return tl.where(_is_finite(average), ALPHA * average + (1 - ALPHA) * count, count)


@triton.jit
def _update_thresholds(
    request_slots,  # [T]
    kth_scores,  # [T]
    candidate_scores,  # [T, most]
    num_candidates,  # [T]
    thresholds,  # [S]
    useful,  # [S]
    vain,  # [S]
    limits,  # [S]
    most,
    ALPHA: tl.constexpr,
    USEFUL: tl.constexpr,
    PROBED: tl.constexpr,
    RESTED: tl.constexpr,
    EACH: tl.constexpr,
    UNLIMITED: tl.constexpr,
    MOST: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(request_slots + row)
    if slot >= 0:
        kth = tl.load(kth_scores + row)
        old = tl.load(thresholds + slot)
        new = tl.where(_is_finite(old), ALPHA * old + (1 - ALPHA) * kth, kth)
        limit = tl.load(limits + slot)
        limit = tl.where(limit == -1, PROBED, limit + (limit < 0).to(tl.int32))
        if _is_finite(old):
            issued = tl.load(num_candidates + row)
            column = tl.arange(0, MOST)
            score = tl.load(
                candidate_scores + row * most + column, mask=column < issued, other=float("-inf")
            )
            counted = column < issued
            reached = counted & (score >= kth)
            useful_after = _moved(tl.load(useful + slot), tl.sum(reached.to(tl.int32)), USEFUL)
            missed = tl.sum((counted & (reached == 0)).to(tl.int32))
            vain_after = _moved(tl.load(vain + slot), missed, USEFUL)
            tl.store(useful + slot, useful_after)
            tl.store(vain + slot, vain_after)
            limit = (PROBED + EACH * useful_after).to(tl.int32)
            no_limit = tl.where(vain_after <= useful_after, UNLIMITED, limit)
            limit = tl.where(limit == PROBED, -RESTED, no_limit)
        tl.store(limits + slot, limit)
        predicts = _is_finite(kth) & (limit >= 0)
        tl.store(thresholds + slot, tl.where(predicts, new, float("inf")))


def update_thresholds(
    request_slots: Tensor,
    kth_scores: Tensor,
    candidate_scores: Tensor,
    num_candidates: Tensor,
    thresholds: Tensor,
    useful: Tensor,
    vain: Tensor,
    limits: Tensor,
) -> None:
    """Learn from the true k-th scores; see `reference.update_thresholds`."""
    check_learn_args(
        request_slots, kth_scores, candidate_scores, num_candidates,
        thresholds, useful, vain, limits,
    )  # fmt: skip
    rows, most = candidate_scores.shape
    if rows == 0:
        return
    _update_thresholds[(rows,)](
        request_slots, kth_scores, candidate_scores, num_candidates,
        thresholds, useful, vain, limits,
        most, ALPHA=EMA_ALPHA, USEFUL=USEFUL_ALPHA, PROBED=PROBES, RESTED=RESTS,
        EACH=ROWS_FOR_A_USEFUL_ONE, UNLIMITED=NO_LIMIT, MOST=triton.next_power_of_2(most),
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
            "useful": "*fp32",
            "vain": "*fp32",
            "limits": "*i32",
            "most": "i32",
            "ALPHA": EMA_ALPHA,
            "USEFUL": USEFUL_ALPHA,
            "PROBED": PROBES,
            "RESTED": RESTS,
            "EACH": ROWS_FOR_A_USEFUL_ONE,
            "UNLIMITED": NO_LIMIT,
            "MOST": 512,
        },
    ),
)
