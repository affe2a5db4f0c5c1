"""Make room in one layer's device pool: evict the lowest priorities (plain PyTorch)."""

import torch
from torch import Tensor

from echokv.kernels.cache_args import check_layer, check_scalars, check_workspace
from echokv.memory.slots import NO_SLOT


def free(
    num_needed: Tensor,
    floor: Tensor,
    device_free: Tensor,
    priority: Tensor,
    device_to_host: Tensor,
    host_to_device: Tensor,
    slot_buffer: Tensor,
    num_freed: Tensor,
    workspace: Tensor,
) -> None:
    """Evict until num_needed slots are free, or nothing more may go.

    Victims are the max(0, num_needed - free slots) slots of lowest (priority, slot) among those
    with 0 <= priority < floor. They become free, their host slots absent.

    Args:
        num_needed: [1] int32, slots that must be free afterwards.
        floor: [1] int32, lowest priority that may not go.
        device_free: [N_G] uint8, 1 is free.
        priority: [N_G] int32, -1 when free.
        device_to_host: [N_G] int32, -1 for none.
        host_to_device: [N_H] int32, -1 for absent.
        slot_buffer: [N_G] int32 out: the victims in ascending order, -1 after them.
        num_freed: [1] int32 out: how many.
        workspace: [WORKSPACE_INTS] int32 scratch.
    """
    check_layer(device_free, priority, device_to_host, host_to_device, slot_buffer)
    check_scalars(priority.device, num_needed=num_needed, floor=floor, num_freed=num_freed)
    check_workspace(workspace, priority.device)
    shortage = max(0, int(num_needed) - int(device_free.sum()))
    candidates = ((priority >= 0) & (priority < floor)).nonzero().squeeze(1)
    order = torch.sort(priority[candidates], stable=True).indices[:shortage]
    victims = candidates[order].sort().values
    host_to_device[device_to_host[victims].long()] = NO_SLOT
    device_to_host[victims] = NO_SLOT
    device_free[victims] = 1
    priority[victims] = -1
    slot_buffer.fill_(NO_SLOT)
    slot_buffer[: victims.shape[0]] = victims.to(slot_buffer.dtype)
    num_freed[0] = victims.shape[0]
