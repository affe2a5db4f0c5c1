"""Host slots to device slots."""

import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.cache_args import check_entries, check_maps

_BLOCK = 1024


@triton.jit
def _translate(
    host_slots,
    priorities,
    host_to_device,
    priority,
    device_slots,  # [entries] out
    entries,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(host_slots + index, mask=index < entries, other=-1)
    found = tl.load(host_to_device + slot.to(tl.int64), mask=slot >= 0, other=-1)
    level = tl.load(priorities + index, mask=index < entries, other=-1)
    tl.atomic_max(priority + found, level, mask=found >= 0, sem="relaxed")
    tl.store(device_slots + index, found, mask=index < entries)


def translate(
    host_slots: Tensor,
    priorities: Tensor,
    host_to_device: Tensor,
    priority: Tensor,
    device_slots: Tensor,
) -> None:
    """Say where resident rows are, and raise their priorities; see `reference.translate`."""
    check_maps(host_to_device, priority)
    check_entries(priority.device, host_slots, priorities=priorities, device_slots=device_slots)
    entries = host_slots.shape[0]
    if entries == 0:
        return
    _translate[(triton.cdiv(entries, _BLOCK),)](
        host_slots, priorities, host_to_device, priority, device_slots, entries, BLOCK=_BLOCK
    )


COMPILE_SIGNATURES = (
    (
        _translate,
        dict.fromkeys(
            ("host_slots", "priorities", "host_to_device", "priority", "device_slots"), "*i32"
        )
        | {"entries": "i32", "BLOCK": _BLOCK},
    ),
)
