"""How many prefetched rows the selection wanted: one program, off the critical path."""

import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.prefetch_args import check_useful_args

_BLOCK = 2048
_WARPS = 8


@triton.jit
def _count_useful(
    host_slots,  # [entries]
    floor,  # [1]
    host_to_device,  # [N_H]
    priority,  # [N_G]
    total,  # [1] int64
    entries,
    BLOCK: tl.constexpr,
):
    protected = tl.load(floor)
    useful = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < entries:
        index = start + tl.arange(0, BLOCK)
        slot = tl.load(host_slots + index, mask=index < entries, other=-1)
        where = tl.load(host_to_device + slot.to(tl.int64), mask=slot >= 0, other=-1)
        level = tl.load(priority + where, mask=where >= 0, other=-1)
        useful += ((where >= 0) & (level > protected)).to(tl.int32)
        start += BLOCK
    tl.store(total, tl.load(total) + tl.sum(useful).to(tl.int64))


def count_useful(
    host_slots: Tensor, floor: Tensor, host_to_device: Tensor, priority: Tensor, total: Tensor
) -> None:
    """Add the rows among host_slots whose priority is above the floor; see `reference`."""
    check_useful_args(host_slots, floor, host_to_device, priority, total)
    _count_useful[(1,)](
        host_slots, floor, host_to_device, priority, total, host_slots.shape[0], BLOCK=_BLOCK,
        num_warps=_WARPS,
    )  # fmt: skip


COMPILE_SIGNATURES = (
    (
        _count_useful,
        dict.fromkeys(("host_slots", "floor", "host_to_device", "priority"), "*i32")
        | {"total": "*i64", "entries": "i32", "BLOCK": _BLOCK},
        {"num_warps": _WARPS},
    ),
)
