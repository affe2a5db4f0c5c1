"""How many prefetched rows the selection wanted: one program a layer, off the critical path."""

import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.prefetch_args import check_useful_args

_BLOCK = 2048
_WARPS = 8


@triton.jit
def _count_useful(
    host_slots,  # [N, entries]
    layers,  # [N]
    floor,  # [1]
    host_to_device,  # [L, h_slots]
    priority,  # [L, g_slots]
    totals,  # [L] int64
    entries,
    h_slots,
    g_slots,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    layer = tl.load(layers + row).to(tl.int64)
    protected = tl.load(floor)
    useful = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < entries:
        index = start + tl.arange(0, BLOCK)
        slot = tl.load(host_slots + row * entries + index, mask=index < entries, other=-1)
        place = layer * h_slots + slot.to(tl.int64)
        where = tl.load(host_to_device + place, mask=slot >= 0, other=-1)
        place = layer * g_slots + where.to(tl.int64)
        level = tl.load(priority + place, mask=where >= 0, other=-1)
        useful += ((where >= 0) & (level > protected)).to(tl.int32)
        start += BLOCK
    tl.store(totals + layer, tl.load(totals + layer) + tl.sum(useful).to(tl.int64))


def count_useful(
    host_slots: Tensor,
    layers: Tensor,
    floor: Tensor,
    host_to_device: Tensor,
    priority: Tensor,
    totals: Tensor,
) -> None:
    """Add the rows among host_slots whose priority is above the floor; see `reference`."""
    check_useful_args(host_slots, layers, floor, host_to_device, priority, totals)
    rows, entries = host_slots.shape
    _count_useful[(rows,)](
        host_slots, layers, floor, host_to_device, priority, totals, entries,
        host_to_device.shape[1], priority.shape[1], BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


COMPILE_SIGNATURES = (
    (
        _count_useful,
        dict.fromkeys(("host_slots", "layers", "floor", "host_to_device", "priority"), "*i32")
        | {"totals": "*i64"}
        | dict.fromkeys(("entries", "h_slots", "g_slots"), "i32")
        | {"BLOCK": _BLOCK},
        {"num_warps": _WARPS},
    ),
)
