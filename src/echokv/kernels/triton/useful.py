"""How many prefetched rows the selection wanted."""

import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.prefetch_args import check_useful_args

_BLOCK = 1024
_WARPS = 4


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
    """One program for some entries of a row."""
    row = tl.program_id(1).to(tl.int64)
    layer = tl.load(layers + row).to(tl.int64)
    protected = tl.load(floor)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(host_slots + row * entries + index, mask=index < entries, other=-1)
    place = layer * h_slots + slot.to(tl.int64)
    where = tl.load(host_to_device + place, mask=slot >= 0, other=-1)
    place = layer * g_slots + where.to(tl.int64)
    level = tl.load(priority + place, mask=where >= 0, other=-1)
    useful = tl.sum(((where >= 0) & (level > protected)).to(tl.int32))
    if useful > 0:
        tl.atomic_add(totals + layer, useful.to(tl.int64), sem="relaxed")


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
    if rows == 0 or entries == 0:
        return
    _count_useful[(triton.cdiv(entries, _BLOCK), rows)](
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
