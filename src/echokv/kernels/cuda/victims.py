"""Which slots may leave, in what order: every layer's ready list, made anew when it runs low."""

import ctypes

import torch

from echokv.kernels.cuda.launch import Arguments, CudaModule, pointer
from echokv.kernels.fused_layer import FusedLayers

MODULE = CudaModule("victims", threads=512)
KERNELS = ("choose_victims",)

AGES = 8192
"""Bins of age, eight a step: a ready list is exact for priorities of the last 1,023 steps before it
was made; rows older than that count as equally old."""

SHARED_BYTES = 4 * (16 + AGES)
"""sizeof(VictimShared)."""

_CLUSTERS = (8, 4)  # blocks of a layer: as many as leave all layers resident at once
_BLOCKS_PER_SM = 2


class VictimArguments(Arguments):
    """See victims.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "floor", "priority", "device_to_host", "device_free", "host_to_device", "ready",
                "cursor", "totals",
            )
        ),
        *(
            (name, ctypes.c_int32)
            for name in ("slots", "host_slots", "most_rows", "most_free", "partly")
        ),
    )  # fmt: skip


def choose_victims(layers: FusedLayers, most_rows: int, most_free: int, *, partly: bool) -> None:
    """Make sure that each layer's list names enough slots that may leave, in the right order.

    A list that has as many names left as a step may take stays as it is. Any other is made anew:
    free slots first, then occupied ones by priority, lowest first; among equals any order. Slots
    that are protected aren't on it.

    Nothing may be protected in this step yet that was listed before, as it is when the floor has
    just risen.

    Then the rows that are next to leave do so, half as many again as the last step took slots: to
    take a free slot nobody need wait until all have looked at what is selected, and no row that is
    selected can be in it.

    Args:
        layers: changed in place; cursors are zeros for a layer that has no list, STALE in column
            TOUCHED for one whose list is not to be used any longer.
        most_rows: names that must be left: most rows that this step may select or take in.
        most_free: slots that are made free ahead of need, at most.
        partly: whether so many are when more are needed; otherwise none is.
    """
    layers.check()
    if most_rows <= 0:
        raise ValueError(f"most_rows must be positive, got {most_rows}")
    device, (count, _) = layers.priority.device, layers.priority.shape
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    cluster = cluster_size(count, sms)
    MODULE.launch(
        "choose_victims", victim_arguments(layers, most_rows, most_free, partly), device,
        blocks=count * cluster, shared_bytes=SHARED_BYTES, cluster=cluster,
    )  # fmt: skip


def victim_arguments(
    layers: FusedLayers, most_rows: int, most_free: int, partly: bool
) -> VictimArguments:
    """What the kernel takes."""
    return VictimArguments(
        *(
            pointer(tensor)
            for tensor in (
                layers.floor, layers.priority, layers.device_to_host, layers.device_free,
                layers.host_to_device, layers.ready, layers.cursor, layers.totals,
            )
        ),
        layers.priority.shape[1], layers.host_to_device.shape[1], most_rows, most_free, partly,
    )  # fmt: skip


def cluster_size(layers: int, sms: int) -> int:
    """Blocks of a layer: many for a few layers, and no more than run at once for all."""
    fitting = [size for size in _CLUSTERS if layers * size <= _BLOCKS_PER_SM * sms]
    return fitting[0] if fitting else _CLUSTERS[-1]
