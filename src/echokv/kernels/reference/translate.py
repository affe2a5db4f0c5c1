"""Host slots to device slots (plain PyTorch)."""

import torch
from torch import Tensor

from echokv.kernels.cache_args import check_entries, check_maps
from echokv.memory.slots import NO_SLOT


def translate(
    host_slots: Tensor,
    priorities: Tensor,
    host_to_device: Tensor,
    priority: Tensor,
    device_slots: Tensor,
) -> None:
    """Say where resident rows are, and raise their priorities.

    Args:
        host_slots: [M] int32, -1 for none; duplicates allowed.
        priorities: [M] int32, what each entry's priority is raised to.
        host_to_device: [N_H] int32, -1 for absent.
        priority: [N_G] int32, raised in place: max(old, priorities[i]).
        device_slots: [M] int32 out; -1 where host_slots is -1 or the row is absent.
    """
    check_maps(host_to_device, priority)
    check_entries(priority.device, host_slots, priorities=priorities, device_slots=device_slots)
    found = host_to_device[host_slots.clamp(min=0).long()]
    device_slots.copy_(torch.where(host_slots >= 0, found, NO_SLOT))
    hit = device_slots >= 0
    priority.scatter_reduce_(0, device_slots[hit].long(), priorities[hit], "amax")
