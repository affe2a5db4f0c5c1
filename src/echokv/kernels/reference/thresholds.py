"""What a step teaches about the next: predicted k-th scores, and how many rows they are worth."""

import torch
from torch import Tensor

from echokv.kernels.prefetch_args import (
    EMA_ALPHA,
    PROBES,
    RESTS,
    ROWS_FOR_A_USEFUL_ONE,
    USEFUL_ALPHA,
    check_learn_args,
)


def update_thresholds(
    request_slots: Tensor,
    kth_scores: Tensor,
    candidate_scores: Tensor,
    num_candidates: Tensor,
    thresholds: Tensor,
    useful: Tensor,
    limits: Tensor,
) -> None:
    """Learn from the true k-th scores of one layer.

    The prediction becomes EMA_ALPHA * old + (1 - EMA_ALPHA) * true; the true score alone where
    there was no finite prediction; +inf, no prediction, where the true score isn't finite, as of a
    context of fewer than k tokens. Where there was a finite one, the number of useful rows moves in
    the same way, by USEFUL_ALPHA, towards the candidates that reach the true k-th score; it becomes
    that number alone where it wasn't finite. The limit is then PROBES + ROWS_FOR_A_USEFUL_ONE times
    it, rounded down; -RESTS instead of PROBES alone. A limit below zero is one nearer to it after
    each step, PROBES instead of zero, and with it there is no prediction.

    Args:
        request_slots: [T] int32, distinct entries of the state; -1 for rows to skip.
        kth_scores: [T] float32, true.
        candidate_scores: [T, most] float32, what `prefetch_candidates` returned.
        num_candidates: [T] int32, likewise.
        thresholds: [S] float32, in place.
        useful: [S] float32, not negative, in place.
        limits: [S] int32, in place.
    """
    check_learn_args(
        request_slots, kth_scores, candidate_scores, num_candidates, thresholds, useful, limits
    )
    rows = (request_slots >= 0).nonzero().squeeze(1)
    slots = request_slots[rows].long()
    kth, old = kth_scores[rows], thresholds[slots]
    new = torch.where(old.isfinite(), EMA_ALPHA * old + (1 - EMA_ALPHA) * kth, kth)
    place = torch.arange(candidate_scores.shape[1], device=kth.device)
    counted = place < num_candidates[rows][:, None]
    reached = ((candidate_scores[rows] >= kth[:, None]) & counted).sum(dim=1).float()
    before = useful[slots]
    after = USEFUL_ALPHA * before + (1 - USEFUL_ALPHA) * reached
    after = torch.where(before.isfinite(), after, reached)
    limit = (PROBES + ROWS_FOR_A_USEFUL_ONE * after).to(torch.int32)
    limit = torch.where(limit == PROBES, -RESTS, limit)
    kept = limits[slots]
    rested = torch.where(kept == -1, PROBES, kept + (kept < 0))
    limit = torch.where(old.isfinite(), limit, rested)
    useful[slots] = torch.where(old.isfinite(), after, before)
    limits[slots] = limit
    thresholds[slots] = torch.where(kth.isfinite() & (limit >= 0), new, torch.inf)
