"""Forget host slots in every layer before they are handed out again."""

import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.cache_args import check_release

_BLOCK = 256


@triton.jit
def _release(
    host_slots,
    device_free,  # [L, N_G]
    priority,  # [L, N_G]
    device_to_host,  # [L, N_G]
    host_to_device,  # [L, N_H]
    entries,
    device_size,
    host_size,
    BLOCK: tl.constexpr,
):
    layer = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(host_slots + index, mask=index < entries, other=-1)
    place = layer * host_size + slot.to(tl.int64)
    held = tl.load(host_to_device + place, mask=slot >= 0, other=-1)
    resident = held >= 0
    device_place = layer * device_size + held.to(tl.int64)
    none = tl.full([BLOCK], -1, tl.int32)
    # A duplicate may find the slot already absent, or write the same values a second time.
    tl.store(host_to_device + place, none, mask=resident)
    tl.store(device_to_host + device_place, none, mask=resident)
    tl.store(priority + device_place, none, mask=resident)
    tl.store(device_free + device_place, tl.full([BLOCK], 1, tl.uint8), mask=resident)


def release(
    host_slots: Tensor,
    device_free: Tensor,
    priority: Tensor,
    device_to_host: Tensor,
    host_to_device: Tensor,
) -> None:
    """Make the host slots absent in every layer; see `reference.release`."""
    check_release(host_slots, device_free, priority, device_to_host, host_to_device)
    entries = host_slots.shape[0]
    if entries == 0:
        return
    layers, device_size = priority.shape
    _release[(triton.cdiv(entries, _BLOCK), layers)](
        host_slots,
        device_free,
        priority,
        device_to_host,
        host_to_device,
        entries,
        device_size,
        host_to_device.shape[1],
        BLOCK=_BLOCK,
    )


COMPILE_SIGNATURES = (
    (
        _release,
        {"host_slots": "*i32", "device_free": "*u8"}
        | dict.fromkeys(("priority", "device_to_host", "host_to_device"), "*i32")
        | {"entries": "i32", "device_size": "i32", "host_size": "i32", "BLOCK": _BLOCK},
    ),
)
