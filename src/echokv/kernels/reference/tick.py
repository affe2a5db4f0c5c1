"""Start a cache step: advance the clock, keep priorities within int32 (plain PyTorch)."""

import torch
from torch import Tensor

from echokv.kernels.cache_args import (
    CLOCK_REBASE_AT,
    CLOCK_REBASE_KEEP,
    SCORE_BITS,
    check_scalars,
)
from echokv.kernels.checks import check_tensor


def tick(clock: Tensor, floor: Tensor, priority: Tensor) -> None:
    """Advance the clock and set floor = clock << SCORE_BITS, which nothing reaches yet.

    A clock that reaches CLOCK_REBASE_AT becomes CLOCK_REBASE_KEEP, and every priority >= 0 falls
    by the same number of steps, to 0 at the lowest: the order of rows used in the last
    CLOCK_REBASE_KEEP steps survives.

    Args:
        clock: [1] int32, in place.
        floor: [1] int32 out.
        priority: [L, N_G] int32, -1 when free; changed by a rebase only.
    """
    check_tensor("priority", priority, (None, None), torch.int32)
    check_scalars(priority.device, clock=clock, floor=floor)
    clock += 1
    if int(clock) >= CLOCK_REBASE_AT:
        shift = (int(clock) - CLOCK_REBASE_KEEP) << SCORE_BITS
        priority.copy_(torch.where(priority >= 0, (priority - shift).clamp(min=0), priority))
        clock.fill_(CLOCK_REBASE_KEEP)
    floor.copy_(clock << SCORE_BITS)
