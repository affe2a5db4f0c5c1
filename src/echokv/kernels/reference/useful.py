"""How many prefetched rows the selection wanted (plain PyTorch)."""

from torch import Tensor

from echokv.kernels.prefetch_args import check_useful_args


def count_useful(
    host_slots: Tensor, floor: Tensor, host_to_device: Tensor, priority: Tensor, total: Tensor
) -> None:
    """Add to total the resident rows among host_slots whose priority is above the floor.

    Prefetched rows enter at the floor, and `make_resident` raises what it is asked for above it.

    Args:
        host_slots: [M] int32, distinct; -1 for none.
        floor: [1] int32, lowest priority that is protected in this step.
        host_to_device: [N_H] int32, -1 for absent.
        priority: [N_G] int32.
        total: [1] int64, in place.
    """
    check_useful_args(host_slots, floor, host_to_device, priority, total)
    slots = host_to_device[host_slots[host_slots >= 0].long()]
    total += (priority[slots[slots >= 0].long()] > floor).sum()
