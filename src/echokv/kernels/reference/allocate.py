"""Give free device slots to host slots (plain PyTorch)."""

from torch import Tensor

from echokv.kernels.cache_args import (
    check_entries,
    check_layer,
    check_scalars,
    check_workspace,
)
from echokv.memory.slots import NO_SLOT


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
    """Map host_slots[i] to the i-th lowest free device slot, for i < count.

    When fewer than count slots are free, the entries past them get none and change nothing.

    Args:
        host_slots: [M] int32, M <= N_G; the first count are distinct and absent.
        count: [1] int32.
        floor: [1] int32, the priority that allocated slots get: protected in this step.
        device_free: [N_G] uint8, 1 is free.
        priority: [N_G] int32, -1 when free.
        device_to_host: [N_G] int32, -1 for none.
        host_to_device: [N_H] int32, -1 for absent.
        slot_buffer: [N_G] int32 out: device slot of entry i, -1 after them.
        num_allocated: [1] int32 out: how many got a slot.
        workspace: [WORKSPACE_INTS] int32 scratch.
    """
    check_layer(device_free, priority, device_to_host, host_to_device, slot_buffer)
    check_entries(priority.device, host_slots)
    check_scalars(priority.device, count=count, floor=floor, num_allocated=num_allocated)
    check_workspace(workspace, priority.device)
    slots = device_free.nonzero().squeeze(1)[: int(count)]
    owners = host_slots[: slots.shape[0]]
    device_free[slots] = 0
    priority[slots] = floor
    device_to_host[slots] = owners
    host_to_device[owners.long()] = slots.to(host_to_device.dtype)
    slot_buffer.fill_(NO_SLOT)
    slot_buffer[: slots.shape[0]] = slots.to(slot_buffer.dtype)
    num_allocated[0] = slots.shape[0]
