"""Which of the wanted host slots are resident, which are missing (plain PyTorch)."""

from torch import Tensor

from echokv.kernels.cache_args import (
    check_entries,
    check_maps,
    check_scalars,
    check_workspace,
)
from echokv.memory.slots import NO_SLOT


def lookup(
    host_slots: Tensor,
    priorities: Tensor,
    floor: Tensor,
    host_to_device: Tensor,
    priority: Tensor,
    missing: Tensor,
    num_missing: Tensor,
    num_hits: Tensor,
    workspace: Tensor,
) -> None:
    """Protect the resident entries and compact the absent ones.

    Args:
        host_slots: [M] int32, -1 for none; duplicates allowed.
        priorities: [M] int32, what a resident entry's priority is raised to.
        floor: [1] int32, lowest priority that is protected in this step.
        host_to_device: [N_H] int32, -1 for absent; the same after the call as before.
        priority: [N_G] int32, raised in place: max(old, priorities[i]) over all i that hit.
        missing: [M] int32 out: absent host slots, each once, in the order of the last index at
            which each occurs; -1 after them.
        num_missing: [1] int32 out: how many.
        num_hits: [1] int32 out: device slots whose priority was <= floor and is > floor now:
            with priorities above the floor, distinct resident rows selected in this step.
        workspace: [WORKSPACE_INTS] int32 scratch.
    """
    device = priority.device
    check_maps(host_to_device, priority)
    check_entries(device, host_slots, priorities=priorities, missing=missing)
    check_scalars(device, floor=floor, num_missing=num_missing, num_hits=num_hits)
    check_workspace(workspace, device)
    wanted = host_slots >= 0
    device_slots = host_to_device[host_slots.clamp(min=0).long()]
    hit = wanted & (device_slots >= 0)
    before = priority > floor
    priority.scatter_reduce_(0, device_slots[hit].long(), priorities[hit], "amax")
    num_hits[0] = ((priority > floor) & ~before).sum()

    absent = (wanted & ~hit).nonzero().squeeze(1)
    slots = host_slots[absent].long()
    claims = (-2 - absent).to(host_to_device.dtype)  # the last index claims its slot
    host_to_device.scatter_reduce_(0, slots, claims, "amin")
    winners = slots[host_to_device[slots] == claims]
    host_to_device[winners] = NO_SLOT
    missing.fill_(NO_SLOT)
    missing[: winners.shape[0]] = winners.to(missing.dtype)
    num_missing[0] = winners.shape[0]
