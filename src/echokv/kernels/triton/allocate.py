"""Give free device slots to host slots: count the free by blocks, then hand them out in order."""

import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.cache_args import check_entries, check_layer, check_scalars, check_workspace
from echokv.kernels.triton.blocks import (
    COUNTS_A,
    block_size,
    grid_size,
    rank_in_block,
    sum_of_blocks,
)


@triton.jit
def _count_free(count, device_free, free_counts, slots, BLOCK: tl.constexpr):
    if tl.load(count) > 0:
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        is_free = tl.load(device_free + index, mask=index < slots, other=0).to(tl.int32)
        tl.store(free_counts + tl.program_id(0), tl.sum(is_free))


@triton.jit
def _hand_out(
    host_slots,
    count,
    floor,
    device_free,
    priority,
    device_to_host,
    host_to_device,
    slot_buffer,
    num_allocated,
    free_counts,
    slots,
    programs,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    program = tl.program_id(0)
    index = program * BLOCK + tl.arange(0, BLOCK)
    wanted = tl.load(count)
    given = 0
    if wanted > 0:
        num_free, before = sum_of_blocks(free_counts, programs, program, PROGRAMS)
        given = tl.minimum(wanted, num_free)
        is_free = tl.load(device_free + index, mask=index < slots, other=0)
        rank = before + rank_in_block(is_free.to(tl.int32))
        taken = (is_free != 0) & (rank < given)
        owner = tl.load(host_slots + rank, mask=taken, other=0)
        level = tl.full([BLOCK], 0, tl.int32) + tl.load(floor)
        tl.store(slot_buffer + rank, index, mask=taken)
        tl.store(host_to_device + owner.to(tl.int64), index, mask=taken)
        tl.store(device_to_host + index, owner, mask=taken)
        tl.store(priority + index, level, mask=taken)
        tl.store(device_free + index, tl.zeros([BLOCK], tl.uint8), mask=taken)
    none = tl.full([BLOCK], -1, tl.int32)
    tl.store(slot_buffer + index, none, mask=(index >= given) & (index < slots))
    if program == 0:
        tl.store(num_allocated, given)


def allocate(
    host_slots: Tensor,
    count: Tensor,
    floor: Tensor,
    device_free: Tensor,
    priority: Tensor,
    device_to_host: Tensor,
    host_to_device: Tensor,
    slot_buffer: Tensor,
    num_allocated: Tensor,
    workspace: Tensor,
) -> None:
    """Map host_slots[i] to the i-th lowest free device slot; see `reference.allocate`."""
    check_layer(device_free, priority, device_to_host, host_to_device, slot_buffer)
    check_entries(priority.device, host_slots)
    check_scalars(priority.device, count=count, floor=floor, num_allocated=num_allocated)
    check_workspace(workspace, priority.device)
    slots = priority.shape[0]
    block = block_size(slots)
    programs, padded = grid_size(slots)
    free_counts = workspace[COUNTS_A:]
    _count_free[(programs,)](count, device_free, free_counts, slots, BLOCK=block)
    _hand_out[(programs,)](
        host_slots,
        count,
        floor,
        device_free,
        priority,
        device_to_host,
        host_to_device,
        slot_buffer,
        num_allocated,
        free_counts,
        slots,
        programs,
        BLOCK=block,
        PROGRAMS=padded,
    )


_INTS = "*i32"
COMPILE_SIGNATURES = (
    (
        _count_free,
        {
            "count": _INTS,
            "device_free": "*u8",
            "free_counts": _INTS,
            "slots": "i32",
            "BLOCK": 1024,
        },
    ),
    (
        _hand_out,
        {"host_slots": _INTS, "count": _INTS, "floor": _INTS, "device_free": "*u8"}
        | dict.fromkeys(
            (
                "priority",
                "device_to_host",
                "host_to_device",
                "slot_buffer",
                "num_allocated",
                "free_counts",
            ),
            _INTS,
        )
        | {"slots": "i32", "programs": "i32", "BLOCK": 1024, "PROGRAMS": 256},
    ),
)
