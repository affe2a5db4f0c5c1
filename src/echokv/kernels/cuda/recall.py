"""A layer's recall in one launch; `recall` itself as a gather.

`make_resident` stands for lookup, free, allocate, recall and translate with the priorities of
`score_priorities`. It takes victims from the front of a ready list that `choose_victims` has seen
to at the start of the step, and passes over those that have been used since they were listed.
"""

import ctypes

import torch
from torch import Tensor

from echokv.kernels.cache_args import check_entries, check_pools, check_scalars
from echokv.kernels.checks import check_tensor
from echokv.kernels.cuda.launch import Arguments, CudaModule, pointer
from echokv.kernels.fused_layer import FusedLayer

MODULE = CudaModule("recall", threads=512)
KERNELS = ("make_resident", "make_many_resident", "gather_rows")

_WARPS = 16
EARLY = True
"""Whether kernels start while the one before them ends (programmatic dependent launch)."""

BLOCKS_PER_SM = 2
"""Of `make_resident`, all at once; see the launch bounds in recall.cu."""

_GATHER_BLOCKS = 264
_STRETCHES = 32


class Layer(Arguments):
    """One layer's tensors; see claims.cuh."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "floor", "host_to_device", "priority", "device_to_host", "device_free", "ready",
                "cursor", "totals", "barrier", "host_rows", "device_rows",
            )
        ),
        ("row_bytes", ctypes.c_int32),
        ("slots", ctypes.c_int32),
    )  # fmt: skip


class ResidentArguments(Arguments):
    """See recall.cu."""

    _fields_ = (
        ("layer", Layer),
        *((name, ctypes.c_void_p) for name in ("host_slots", "scores", "device_slots")),
        *(
            (name, ctypes.c_int32)
            for name in ("k", "tiles", "tiles_per_row", "lanes", "words_of_16", "stretch")
        ),
    )


class GatherArguments(Arguments):
    """See recall.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("host_slots", "count", "slot_buffer", "host_rows", "device_rows")
        ),
        ("row_bytes", ctypes.c_int32),
        ("words_of_16", ctypes.c_int32),
    )


def make_resident(
    host_slots: Tensor,
    scores: Tensor,
    layer: FusedLayer,
    device_slots: Tensor,
    *,
    lanes: int | None = None,
) -> None:
    """Fetch what is missing of a selection, evicting as needed, and say where all of it is.

    What `lookup`, `free`, `allocate`, `recall` and `translate` do in sequence with the priorities
    of `score_priorities`, but for two freedoms: which free slot a row gets, and which of equally
    old rows leave. Every missing row takes the next name on the ready list whose slot hasn't been
    used since it was listed. Where the list ends, the row stays absent: device slot -1, and it is
    missing from totals[4].

    Args:
        host_slots: [T, k] int32, -1 for none; duplicates allowed.
        scores: [T, k] float32; whatever where host_slots is -1.
        layer: in place; totals += distinct rows found, recalled, evicted, 0, allocated.
        device_slots: [T, k] int32 out, -1 exactly where host_slots is -1 or no room was left.
        lanes: entries of a warp, at most 32; None: by the size of the selection.
    """
    layer.check()
    device = layer.priority.device
    check_tensor("host_slots", host_slots, (None, None), torch.int32, device=device)
    rows, k = host_slots.shape
    check_tensor("scores", scores, (rows, k), torch.float32, device=device)
    check_tensor("device_slots", device_slots, (rows, k), torch.int32, device=device)
    if rows == 0 or k == 0:
        return
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    plan = resident_plan(rows, k, sms, lanes)
    arguments = ResidentArguments(
        layer_of(layer), pointer(host_slots), pointer(scores), pointer(device_slots), k,
        plan.tiles, plan.tiles_per_row, plan.lanes,
        moves_16_bytes(layer.host_rows, layer.device_rows), stretch_of(layer),
    )  # fmt: skip
    kernel = "make_resident" if plan.tiles == plan.blocks else "make_many_resident"
    MODULE.launch(
        kernel, arguments, device, blocks=plan.blocks,
        shared_bytes=resident_shared_bytes(MODULE.threads), early=EARLY,
    )  # fmt: skip


def layer_of(layer: FusedLayer) -> Layer:
    """The same as kernels take it."""
    slots, row_bytes = layer.device_rows.shape
    return Layer(
        pointer(layer.floor), pointer(layer.host_to_device), pointer(layer.priority),
        pointer(layer.device_to_host), pointer(layer.device_free), pointer(layer.ready),
        pointer(layer.cursor), pointer(layer.totals), pointer(layer.barrier),
        pointer(layer.host_rows), pointer(layer.device_rows), row_bytes, slots,
    )  # fmt: skip


def recall(
    host_slots: Tensor, count: Tensor, slot_buffer: Tensor, host_rows: Tensor, device_rows: Tensor
) -> None:
    """device_rows[slot_buffer[i]] = host_rows[host_slots[i]]; see `reference.recall`."""
    device, slots = device_rows.device, device_rows.shape[0]
    check_pools(host_rows, device_rows)
    check_entries(device, host_slots)
    check_tensor("slot_buffer", slot_buffer, (slots,), torch.int32, device=device)
    check_scalars(device, count=count)
    entries = host_slots.shape[0]
    if entries == 0:
        return
    arguments = GatherArguments(
        pointer(host_slots), pointer(count), pointer(slot_buffer), pointer(host_rows),
        pointer(device_rows), device_rows.shape[1], moves_16_bytes(host_rows, device_rows),
    )  # fmt: skip
    blocks = min(-(-entries // _WARPS), _GATHER_BLOCKS)
    MODULE.launch("gather_rows", arguments, device, blocks=blocks)


def resident_shared_bytes(threads: int) -> int:
    """sizeof(RecallShared) for blocks of so many threads."""
    return 4 * (2 * threads // 32 + 8 + _STRETCHES + 2 * threads)


def stretch_of(layer: FusedLayer) -> int:
    """Host slots of a stretch: a block moves its rows in the order of these."""
    return max(1, -(-layer.host_rows.shape[0] // _STRETCHES))


class ResidentPlan:
    """How a selection is cut up: a tile is one block's share, of one row."""

    def __init__(self, rows: int, k: int, lanes: int, most_blocks: int, warps: int) -> None:
        self.lanes = lanes
        self.tiles_per_row = -(-k // (warps * lanes))
        self.tiles = rows * self.tiles_per_row
        self.blocks = min(self.tiles, most_blocks)


def resident_plan(
    rows: int, k: int, sms: int, lanes: int | None = None, warps: int = _WARPS
) -> ResidentPlan:
    """Few entries a warp, since a warp copies what its own entries miss; one block an SM if it can.

    All blocks are resident at once, which the wait inside relies on.
    """
    most = BLOCKS_PER_SM * sms
    if lanes is not None:
        return ResidentPlan(rows, k, lanes, most, warps)
    for few in (4, 8, 16, 32):
        plan = ResidentPlan(rows, k, few, most, warps)
        if plan.tiles <= sms:
            break
    return plan


def moves_16_bytes(*pools: Tensor) -> int:
    """Whether rows start at, and are made of, sixteen-byte words."""
    return int(all(pool.shape[1] % 16 == 0 and pool.data_ptr() % 16 == 0 for pool in pools))
