"""What a step teaches about the next: predicted k-th scores, and whether to trust them."""

import torch
from torch import Tensor

from echokv.kernels.prefetch_args import (
    EMA_ALPHA,
    TURN_OFF_BELOW,
    TURN_ON_FROM,
    USEFULNESS_ALPHA,
    check_learn_args,
)


def update_thresholds(
    request_slots: Tensor,
    kth_scores: Tensor,
    candidate_scores: Tensor,
    num_candidates: Tensor,
    thresholds: Tensor,
    usefulness: Tensor,
    enabled: Tensor,
) -> None:
    """Learn from the true k-th scores of one layer.

    The prediction becomes EMA_ALPHA * old + (1 - EMA_ALPHA) * true; the true score alone where
    there was no finite prediction; +inf, no prediction, where the true score isn't finite, as of a
    context of fewer than k tokens. The usefulness of a row with candidates moves in the same way
    towards the share of its candidates that reach the true k-th score; `enabled` becomes 0 where
    it is below TURN_OFF_BELOW and 1 from TURN_ON_FROM on.

    Args:
        request_slots: [T] int32, distinct entries of the state; -1 for rows to skip.
        kth_scores: [T] float32, true.
        candidate_scores: [T, most] float32, what `prefetch_candidates` returned.
        num_candidates: [T] int32, likewise.
        thresholds: [S] float32, in place.
        usefulness: [S] float32 in [0, 1], in place.
        enabled: [S] int32, in place.
    """
    check_learn_args(
        request_slots, kth_scores, candidate_scores, num_candidates, thresholds, usefulness, enabled
    )
    rows = (request_slots >= 0).nonzero().squeeze(1)
    slots = request_slots[rows].long()
    kth, old = kth_scores[rows], thresholds[slots]
    new = torch.where(old.isfinite(), EMA_ALPHA * old + (1 - EMA_ALPHA) * kth, kth)
    thresholds[slots] = torch.where(kth.isfinite(), new, torch.inf)

    learning = num_candidates[rows] > 0
    slots, kth, issued = slots[learning], kth[learning], num_candidates[rows][learning]
    place = torch.arange(candidate_scores.shape[1], device=issued.device)
    reached = candidate_scores[rows][learning] >= kth[:, None]
    share = (reached & (place < issued[:, None])).sum(dim=1).float() / issued.float()
    after = USEFULNESS_ALPHA * usefulness[slots] + (1 - USEFULNESS_ALPHA) * share
    usefulness[slots] = after
    on = torch.where(after < TURN_OFF_BELOW, 0, enabled[slots])
    enabled[slots] = torch.where(after >= TURN_ON_FROM, 1, on).to(torch.int32)
