"""Eviction priorities from one selection's index scores (plain PyTorch)."""

import torch
from torch import Tensor

from echokv.kernels.cache_args import SCORE_BITS, SCORE_LEVELS, check_priorities


def score_priorities(clock: Tensor, scores: Tensor, host_slots: Tensor, priorities: Tensor) -> None:
    """Priority = the step, then the place of the score between the row's lowest and highest.

    That place is cut into seven levels of equal width, 1 to 7; level 0 is left to rows that are
    only written in this step. Where a row has one distinct score, all of it is at level 1.

    Args:
        clock: [1] int32, the current step.
        scores: [T, k] float32; whatever where host_slots is -1.
        host_slots: [T, k] int32, -1 for none.
        priorities: [T, k] int32 out: (clock << 3) + level; clock << 3 where host_slots is -1.
    """
    check_priorities(clock, scores, host_slots, priorities)
    chosen = host_slots >= 0
    low = torch.where(chosen, scores, torch.inf).amin(dim=1, keepdim=True)
    high = torch.where(chosen, scores, -torch.inf).amax(dim=1, keepdim=True)
    place = (scores - low) / (high - low)
    place = torch.where(place > 0, place, 0.0)  # NaN, as of 0 / 0, becomes 0 too
    level = 1 + (place * SCORE_LEVELS).clamp(max=SCORE_LEVELS - 1).to(torch.int32)
    priorities.copy_((clock << SCORE_BITS) + torch.where(chosen, level, 0))
