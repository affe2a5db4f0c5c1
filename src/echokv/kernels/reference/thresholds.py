"""What a step teaches about the next: predicted k-th scores, and how many rows they are worth."""

import torch
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
    """Learn from the true k-th scores of one layer.

    The prediction becomes EMA_ALPHA * old + (1 - EMA_ALPHA) * true; the true score alone where
    there was no finite prediction; +inf, no prediction, where the true score isn't finite, as of a
    context of fewer than k tokens. Where there was a finite one, the number of useful rows moves in
    the same way, by USEFUL_ALPHA, towards the candidates that reach the true k-th score, and that
    of rows in vain towards the others; each becomes that number alone where it wasn't finite. The
    limit is then PROBES + ROWS_FOR_A_USEFUL_ONE times the useful ones, rounded down; -RESTS instead
    of PROBES alone; otherwise NO_LIMIT where no more are in vain than useful. A limit below zero is
    one nearer to it after each step, PROBES instead of zero, and with it there is no prediction.

    Args:
        request_slots: [T] int32, distinct entries of the state; -1 for rows to skip.
        kth_scores: [T] float32, true.
        candidate_scores: [T, most] float32, what `prefetch_candidates` returned.
        num_candidates: [T] int32, likewise.
        thresholds: [S] float32, in place.
        useful: [S] float32, not negative, in place.
        vain: [S] float32, likewise.
        limits: [S] int32, in place.
    """
    check_learn_args(
        request_slots, kth_scores, candidate_scores, num_candidates,
        thresholds, useful, vain, limits,
    )  # fmt: skip
    rows = (request_slots >= 0).nonzero().squeeze(1)
    slots = request_slots[rows].long()
    kth, old = kth_scores[rows], thresholds[slots]
    new = torch.where(old.isfinite(), EMA_ALPHA * old + (1 - EMA_ALPHA) * kth, kth)
    place = torch.arange(candidate_scores.shape[1], device=kth.device)
    counted = place < num_candidates[rows][:, None]
    reached = (candidate_scores[rows] >= kth[:, None]) & counted
    useful_before, vain_before = useful[slots], vain[slots]
    useful_after = _moved(useful_before, reached)
    vain_after = _moved(vain_before, counted & ~reached)
    limit = (PROBES + ROWS_FOR_A_USEFUL_ONE * useful_after).to(torch.int32)
    no_limit = torch.where(vain_after <= useful_after, NO_LIMIT, limit)
    limit = torch.where(limit == PROBES, -RESTS, no_limit)
    kept = limits[slots]
    rested = torch.where(kept == -1, PROBES, kept + (kept < 0))
    limit = torch.where(old.isfinite(), limit, rested)
    useful[slots] = torch.where(old.isfinite(), useful_after, useful_before)
    vain[slots] = torch.where(old.isfinite(), vain_after, vain_before)
    limits[slots] = limit
    thresholds[slots] = torch.where(kth.isfinite() & (limit >= 0), new, torch.inf)


def _moved(average: Tensor, among: Tensor) -> Tensor:
    """Averages after a step, by how many candidates of each row [T, most] are among some."""
    count = among.sum(dim=1).float()
    moved = USEFUL_ALPHA * average + (1 - USEFUL_ALPHA) * count
    return torch.where(average.isfinite(), moved, count)
