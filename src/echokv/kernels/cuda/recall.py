"""A layer's recall in one launch, and the list of who leaves for it; `recall` itself as a gather.

`make_resident` stands for lookup, free, allocate, recall and translate with the priorities of
`score_priorities`. It takes victims from the front of a ready list that `choose_victims` has made
for all layers at the start of the step, and passes over those that are protected by then.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from echokv.kernels.cache_args import check_entries, check_pools, check_scalars
from echokv.kernels.checks import check_tensor
from echokv.kernels.cuda.launch import Arguments, CudaModule, pointer
from echokv.kernels.fused_layer import FusedLayer

MODULE = CudaModule("recall", threads=512)
KERNELS = ("make_resident", "append_rows", "gather_rows", "choose_victims")

AGES = 8192
"""Bins of age, eight a step: the ready list is exact for priorities of the last 1,023 steps; rows
older than that count as equally old."""

_WARPS = 16
EARLY = True
"""Whether kernels start while the one before them ends (programmatic dependent launch)."""

BLOCKS_PER_SM = 2
"""Of `make_resident`, all at once; see the launch bounds in recall.cu."""

_SHARED_BYTES = 4 * (2 * _WARPS + 8)
"""sizeof(RecallShared)."""

_LANDING_BYTES = 100 * 1024  # at most, of a block, for rows on their way
_DEPTH = 4  # rows of a warp that are on their way at once
_ALONE = 64  # rows that one block appends
_VICTIM_CLUSTER = 4
_GATHER_BLOCKS = 264


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
        ("num_ready", ctypes.c_int32),
    )  # fmt: skip


class ResidentArguments(Arguments):
    """See recall.cu."""

    _fields_ = (
        ("layer", Layer),
        *((name, ctypes.c_void_p) for name in ("host_slots", "scores", "device_slots")),
        *(
            (name, ctypes.c_int32)
            for name in ("k", "tiles", "tiles_per_row", "lanes", "depth", "pad")
        ),
    )


class AppendArguments(Arguments):
    """See recall.cu."""

    _fields_ = (
        ("layer", Layer),
        ("host_slots", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("num_rows", "each", "staged", "pad")),
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


class VictimArguments(Arguments):
    """See recall.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("floor", "priority", "ready", "cursor")),
        *((name, ctypes.c_int32) for name in ("slots", "num_ready")),
    )


def victim_workspace(layers: int, device: torch.device) -> Tensor:
    """Scratch of `choose_victims` and `make_resident`: made once, then only they touch it.

    Returns:
        [layers + 1] int32, zero at first: a cursor into each layer's ready list, and the barrier of
        `make_resident`.
    """
    return torch.zeros(layers + 1, dtype=torch.int32, device=device)


def choose_victims(
    floor: Tensor,
    priority: Tensor,
    ready: Tensor,
    cursors: Tensor,
    num_ready: int,
) -> None:
    """List the slots of each layer in the order in which they may leave.

    Free slots come first, then occupied ones by priority, lowest first; among equals any order.
    Slots that are protected in this step aren't on it. After a list shorter than num_ready comes
    -1.

    Args:
        floor: [1] int32, lowest priority that is protected in this step.
        priority: [L, N_G] int32, -1 when free.
        ready: [L, N_G] int32 out; entries at and past num_ready stay as they are.
        cursors: [>= L] int32 out, 0: where in its list each layer is.
        num_ready: most rows that a layer may take in before the next call, at most N_G.
    """
    device, (layers, slots) = priority.device, priority.shape
    check_tensor("priority", priority, (None, None), torch.int32)
    check_tensor("ready", ready, (layers, slots), torch.int32, device=device)
    check_tensor("cursors", cursors, (None,), torch.int32, device=device)
    check_scalars(device, floor=floor)
    if cursors.shape[0] < layers or not 0 < num_ready <= slots:
        raise ValueError(
            f"cursors must be at least [{layers}] and num_ready in [1, {slots}], got"
            f" {list(cursors.shape)} and {num_ready}"
        )
    arguments = VictimArguments(
        pointer(floor), pointer(priority), pointer(ready), pointer(cursors), slots, num_ready,
    )  # fmt: skip
    MODULE.launch(
        "choose_victims",
        arguments,
        device,
        blocks=layers * _VICTIM_CLUSTER,
        shared_bytes=_SHARED_BYTES + 4 * AGES,
        cluster=_VICTIM_CLUSTER,
    )


def make_resident(
    host_slots: Tensor,
    scores: Tensor,
    layer: FusedLayer,
    device_slots: Tensor,
    *,
    lanes: int | None = None,
    depth: int = _DEPTH,
) -> None:
    """Fetch what is missing of a selection, evicting as needed, and say where all of it is.

    What `lookup`, `free`, `allocate`, `recall` and `translate` do in sequence with the priorities
    of `score_priorities`, but for two freedoms: which free slot a row gets, and which of equally
    old rows leave. Every missing row takes the next name on the ready list whose slot isn't
    protected in this step. Where the list ends, the row stays absent: device slot -1, and it is
    missing from totals[4].

    Args:
        host_slots: [T, k] int32, -1 for none; duplicates allowed.
        scores: [T, k] float32; whatever where host_slots is -1.
        layer: in place; totals += distinct rows found, recalled, evicted, 0, allocated.
        device_slots: [T, k] int32 out, -1 exactly where host_slots is -1 or no room was left.
        lanes: entries of a warp, at most 32; None: by the size of the selection.
        depth: rows of a warp that are on their way from host memory at once.
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
    depth = depth_of(depth, layer)
    arguments = ResidentArguments(
        layer_of(layer), pointer(host_slots), pointer(scores), pointer(device_slots), k,
        plan.tiles, plan.tiles_per_row, plan.lanes, depth, 0,
    )  # fmt: skip
    landing = depth * layer.device_rows.shape[1] * _WARPS
    MODULE.launch(
        "make_resident", arguments, device, blocks=plan.blocks,
        shared_bytes=_SHARED_BYTES + landing, early=EARLY,
    )  # fmt: skip


def append_rows(host_slots: Tensor, rows: Tensor, layer: FusedLayer) -> None:
    """Write new rows to host and make them resident, evicting as needed.

    What `lookup`, `free`, `allocate` and `write_rows` do in sequence, with every priority at the
    floor, and with the freedoms of `make_resident`.

    Args:
        host_slots: [T] int32, distinct, -1 for rows to skip.
        rows: [T, row_bytes] uint8.
        layer: in place; totals += 0, 0, evicted, rows that were absent, allocated.
    """
    layer.check()
    device = layer.priority.device
    check_entries(device, host_slots)
    shape = (host_slots.shape[0], layer.device_rows.shape[1])
    check_tensor("rows", rows, shape, torch.uint8, device=device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    plan = append_plan(*shape, sms)
    whole_words = moves_16_bytes(rows, layer.host_rows, layer.device_rows)
    for start in range(0, shape[0], plan.most):
        count = min(plan.most, shape[0] - start)
        arguments = AppendArguments(
            layer_of(layer), pointer(host_slots[start:]), pointer(rows[start:]), count, plan.each,
            whole_words and plan.staged, 0,
        )  # fmt: skip
        MODULE.launch(
            "append_rows", arguments, device, blocks=-(-count // plan.each),
            shared_bytes=plan.shared_bytes, early=EARLY,
        )  # fmt: skip


def layer_of(layer: FusedLayer) -> Layer:
    """The same as kernels take it."""
    return Layer(
        pointer(layer.floor), pointer(layer.host_to_device), pointer(layer.priority),
        pointer(layer.device_to_host), pointer(layer.device_free), pointer(layer.ready),
        pointer(layer.cursor), pointer(layer.totals), pointer(layer.barrier),
        pointer(layer.host_rows), pointer(layer.device_rows), layer.device_rows.shape[1],
        layer.num_ready,
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


@dataclass(frozen=True, kw_only=True)
class AppendPlan:
    """How new rows are cut up."""

    each: int  # rows of a block
    staged: int  # 1: a block keeps its rows in shared memory
    most: int  # rows of a launch, whose blocks are all resident at once
    shared_bytes: int


def append_plan(rows: int, row_bytes: int, sms: int, threads: int = _WARPS * 32) -> AppendPlan:
    """One block for a decode step's rows, as many as there can be for a prefill's."""
    blocks = BLOCKS_PER_SM * sms
    fits = max(1, _LANDING_BYTES // row_bytes)
    wanted = rows if rows <= _ALONE else max(_WARPS, -(-rows // blocks))
    each = min(wanted, threads, fits)
    return AppendPlan(
        each=each,
        staged=int(row_bytes * each <= _LANDING_BYTES),
        most=each * blocks,
        shared_bytes=_SHARED_BYTES + 4 * threads + each * row_bytes,
    )


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


def depth_of(wanted: int, layer: FusedLayer, warps: int = _WARPS) -> int:
    """How many rows of a warp fit into a block's shared memory; 0 where rows can't be sent for."""
    if not moves_16_bytes(layer.host_rows, layer.device_rows):
        return 0
    return min(wanted, _LANDING_BYTES // (warps * layer.device_rows.shape[1]))


def moves_16_bytes(*pools: Tensor) -> int:
    """Whether rows start at, and are made of, sixteen-byte words."""
    return int(all(pool.shape[1] % 16 == 0 and pool.data_ptr() % 16 == 0 for pool in pools))
