"""A layer of the cache and its new rows as kernels take them; see claims.cuh and append.cuh."""

import ctypes

from torch import Tensor

from echokv.kernels.cuda.launch import Arguments, pointer
from echokv.kernels.fused_layer import FusedLayer, NewRows

EARLY = True
"""Whether kernels start while the one before them ends (programmatic dependent launch)."""

BLOCKS_PER_SM = 2
"""Of kernels whose blocks wait for each other, all at once; see their launch bounds."""


class Layer(Arguments):
    """One layer's tensors; see claims.cuh."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "floor", "host_to_device", "priority", "device_to_host", "device_free", "ready",
                "cursor", "totals", "barrier", "gate", "host_rows", "device_rows",
            )
        ),
        ("row_bytes", ctypes.c_int32),
        ("slots", ctypes.c_int32),
    )  # fmt: skip


class AppendedRows(Arguments):
    """New rows; see append.cuh."""

    _fields_ = (
        ("host_slots", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("count", "each", "staged", "pad")),
    )


def layer_of(layer: FusedLayer) -> Layer:
    """A layer as kernels take it."""
    slots, row_bytes = layer.device_rows.shape
    return Layer(
        pointer(layer.floor), pointer(layer.host_to_device), pointer(layer.priority),
        pointer(layer.device_to_host), pointer(layer.device_free), pointer(layer.ready),
        pointer(layer.cursor), pointer(layer.totals), pointer(layer.barrier),
        pointer(layer.gate), pointer(layer.host_rows), pointer(layer.device_rows), row_bytes, slots,
    )  # fmt: skip


def rows_to_append(new: NewRows, layer: FusedLayer, *, each: int, staged: bool) -> AppendedRows:
    """New rows as kernels take them.

    Args:
        new: the rows.
        layer: where they go.
        each: how many a block appends.
        staged: whether so many fit into its shared memory, if they are made of sixteen-byte words.
    """
    staged = staged and bool(moves_16_bytes(new.rows, layer.host_rows, layer.device_rows))
    count = new.host_slots.shape[0]
    return AppendedRows(pointer(new.host_slots), pointer(new.rows), count, each, staged, 0)


def append_shared_bytes(threads: int, each: int, row_bytes: int) -> int:
    """What a block that appends so many rows needs: AppendShared, and the rows."""
    return -(-4 * (threads // 32 + 8 + threads) // 16) * 16 + each * row_bytes


def moves_16_bytes(*pools: Tensor) -> int:
    """Whether rows start at, and are made of, sixteen-byte words."""
    return int(all(pool.shape[1] % 16 == 0 and pool.data_ptr() % 16 == 0 for pool in pools))
