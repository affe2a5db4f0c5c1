"""Start a cache step: advance the clock, keep priorities within int32.

One program: a rebase passes over every priority with it, about a millisecond once in many hours,
so that all other steps pay for a single tiny launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.cache_args import (
    CLOCK_REBASE_AT,
    CLOCK_REBASE_KEEP,
    SCORE_BITS,
    check_scalars,
)
from echokv.kernels.checks import check_tensor

_BLOCK = 2048
_WARPS = 8


@triton.jit
def _tick(
    clock,
    floor,
    priority,  # [entries]
    entries,
    REBASE_AT: tl.constexpr,
    REBASE_KEEP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    now = tl.load(clock) + 1
    if now >= REBASE_AT:
        shift = (now - REBASE_KEEP) << BITS
        start = 0
        while start < entries:
            index = start + tl.arange(0, BLOCK)
            level = tl.load(priority + index, mask=index < entries, other=-1)
            tl.store(
                priority + index,
                tl.maximum(level - shift, 0),
                mask=(index < entries) & (level >= 0),
            )
            start += BLOCK
        now = REBASE_KEEP
    tl.store(clock, now)
    tl.store(floor, now << BITS)


def tick(clock: Tensor, floor: Tensor, priority: Tensor) -> None:
    """Advance the clock and set the floor; see `reference.tick`."""
    check_tensor("priority", priority, (None, None), torch.int32)
    check_scalars(priority.device, clock=clock, floor=floor)
    assert priority.numel() < 2**31 - _BLOCK, "the rebase counts in int32"
    _tick[(1,)](
        clock,
        floor,
        priority,
        priority.numel(),
        REBASE_AT=CLOCK_REBASE_AT,
        REBASE_KEEP=CLOCK_REBASE_KEEP,
        BITS=SCORE_BITS,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


COMPILE_SIGNATURES = (
    (
        _tick,
        {
            "clock": "*i32",
            "floor": "*i32",
            "priority": "*i32",
            "entries": "i32",
            "REBASE_AT": CLOCK_REBASE_AT,
            "REBASE_KEEP": CLOCK_REBASE_KEEP,
            "BITS": SCORE_BITS,
            "BLOCK": _BLOCK,
        },
        {"num_warps": _WARPS},
    ),
)
