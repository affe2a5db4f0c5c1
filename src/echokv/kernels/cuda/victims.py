"""Which slots may leave, in what order: every layer's ready list, made anew when it runs low."""

import ctypes

import torch
from torch import Tensor

from echokv.kernels.cache_args import check_scalars
from echokv.kernels.checks import check_tensor
from echokv.kernels.cuda.launch import Arguments, CudaModule, pointer
from echokv.kernels.fused_layer import CURSOR

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
        *((name, ctypes.c_void_p) for name in ("floor", "priority", "ready", "cursor")),
        *((name, ctypes.c_int32) for name in ("slots", "most_rows")),
    )


def choose_victims(
    floor: Tensor, priority: Tensor, ready: Tensor, cursor: Tensor, most_rows: int
) -> None:
    """Make sure that each layer's list names enough slots that may leave, in the right order.

    A list that has as many names left as a step may take stays as it is. Any other is made anew:
    free slots first, then occupied ones by priority, lowest first; among equals any order. Slots
    that are protected aren't on it.

    Nothing may be protected in this step yet that was listed before, as it is when the floor has
    just risen.

    Args:
        floor: [1] int32, lowest priority that is protected in this step.
        priority: [L, N_G] int32, -1 when free.
        ready: [L, N_G] int32, in place: a layer's list, as long as its cursor says.
        cursor: [L, CURSOR] int32, in place: see `FusedLayer`; zeros for a layer that has no list,
            STALE in column TOUCHED for one whose list is not to be used any longer.
        most_rows: names that must be left: most rows that this step may select or take in.
    """
    device, (layers, slots) = priority.device, priority.shape
    check_tensor("priority", priority, (None, None), torch.int32)
    check_tensor("ready", ready, (layers, slots), torch.int32, device=device)
    check_tensor("cursor", cursor, (layers, CURSOR), torch.int32, device=device)
    check_scalars(device, floor=floor)
    if most_rows <= 0:
        raise ValueError(f"most_rows must be positive, got {most_rows}")
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    cluster = cluster_size(layers, sms)
    arguments = VictimArguments(
        pointer(floor), pointer(priority), pointer(ready), pointer(cursor), slots, most_rows,
    )  # fmt: skip
    MODULE.launch(
        "choose_victims", arguments, device, blocks=layers * cluster, shared_bytes=SHARED_BYTES,
        cluster=cluster,
    )  # fmt: skip


def cluster_size(layers: int, sms: int) -> int:
    """Blocks of a layer: many for a few layers, and no more than run at once for all."""
    fitting = [size for size in _CLUSTERS if layers * size <= _BLOCKS_PER_SM * sms]
    return fitting[0] if fitting else _CLUSTERS[-1]
