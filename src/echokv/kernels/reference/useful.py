"""How many prefetched rows the selection wanted (plain PyTorch)."""

from torch import Tensor

from echokv.kernels.prefetch_args import check_useful_args


def count_useful(
    host_slots: Tensor,
    layers: Tensor,
    floor: Tensor,
    host_to_device: Tensor,
    priority: Tensor,
    totals: Tensor,
) -> None:
    """Add to a layer's total the resident rows among its host_slots of priority above the floor.

    Prefetched rows enter at the floor, and `make_resident` raises what it is asked for above it.

    Args:
        host_slots: [N, M] int32, distinct within a row; negative for none.
        layers: [N] int32, distinct: which layer each row is of.
        floor: [1] int32, lowest priority that is protected in this step.
        host_to_device: [L, N_H] int32, -1 for absent.
        priority: [L, N_G] int32.
        totals: [L] int64, in place.
    """
    check_useful_args(host_slots, layers, floor, host_to_device, priority, totals)
    for layer, wanted in zip(layers.tolist(), host_slots, strict=True):
        slots = host_to_device[layer][wanted[wanted >= 0].long()]
        totals[layer] += (priority[layer][slots[slots >= 0].long()] > floor).sum()
