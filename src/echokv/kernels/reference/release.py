"""Forget host slots in every layer before they are handed out again (plain PyTorch)."""

from torch import Tensor

from echokv.kernels.cache_args import check_release
from echokv.memory.slots import NO_SLOT


def release(
    host_slots: Tensor,
    device_free: Tensor,
    priority: Tensor,
    device_to_host: Tensor,
    host_to_device: Tensor,
) -> None:
    """Make the host slots absent in every layer and free the device slots that they held.

    Args:
        host_slots: [M] int32, -1 for entries to skip; duplicates allowed.
        device_free: [L, N_G] uint8, 1 is free.
        priority: [L, N_G] int32, -1 when free.
        device_to_host: [L, N_G] int32, -1 for none.
        host_to_device: [L, N_H] int32, -1 for absent.
    """
    check_release(host_slots, device_free, priority, device_to_host, host_to_device)
    slots = host_slots[host_slots >= 0].long()
    layers, places = (host_to_device[:, slots] >= 0).nonzero(as_tuple=True)
    device_slots = host_to_device[layers, slots[places]].long()
    device_free[layers, device_slots] = 1
    priority[layers, device_slots] = -1
    device_to_host[layers, device_slots] = NO_SLOT
    host_to_device[:, slots] = NO_SLOT
