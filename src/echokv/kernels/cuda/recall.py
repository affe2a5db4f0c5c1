"""A layer's recall in one launch; `recall` itself as a gather.

`make_resident` stands for lookup, free, allocate, recall and translate with the priorities of
`score_priorities`. It takes victims from the front of a ready list that `choose_victims` has seen
to at the start of the step, and passes over those that have been used since they were listed.
"""

import ctypes
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from echokv.kernels.cache_args import check_entries, check_pools, check_scalars
from echokv.kernels.checks import check_tensor
from echokv.kernels.cuda.launch import MAX_SHARED_BYTES, Arguments, CudaModule, pointer
from echokv.kernels.cuda.layer import (
    BLOCKS_PER_SM,
    EARLY,
    AppendedRows,
    Layer,
    append_shared_bytes,
    layer_of,
    moves_16_bytes,
    rows_to_append,
)
from echokv.kernels.fused_layer import MOST_NEW_ROWS, FusedLayer, NewRows

WIDE_THREADS = 1024
"""Of a block that has its SM for itself."""

_WIDE = ("make_resident_beside", "make_many_resident_beside")
KERNELS = ("make_resident", "make_many_resident", *_WIDE, "gather_rows")
MODULE = CudaModule("recall", threads=512, others=dict.fromkeys(_WIDE, WIDE_THREADS))

ONE_SM_IN, MOST_IN = 5, 2
"""Of so many SMs, a recall that runs beside other kernels has one for itself; and at most, where
its blocks would otherwise look at one tile after the other."""

MOVERS = 4
"""Warps of such a block that move rows, at least, each one row at a time. With many rows in flight
what runs beside is slower, and a recall of a few hundred rows no faster."""

_GATHER_BLOCKS = 264
_FEW_ENTRIES = 4096  # of a selection
_STRETCHES = 32


class ResidentArguments(Arguments):
    """See entries.cuh."""

    _fields_ = (
        ("layer", Layer),
        ("new_rows", AppendedRows),
        *((name, ctypes.c_void_p) for name in ("host_slots", "scores", "device_slots")),
        *(
            (name, ctypes.c_int32)
            for name in ("k", "tiles", "tiles_per_row", "lanes", "movers", "words_of_16", "stretch")
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
    new_rows: NewRows | None = None,
    beside: bool = False,
    lanes: int | None = None,
) -> None:
    """Fetch what is missing of a selection, evicting as needed, and say where all of it is.

    What `append_rows` of the new rows and then `lookup`, `free`, `allocate`, `recall` and
    `translate` do in sequence with the priorities of `score_priorities`, but for two freedoms:
    which free slot a row gets, and which of equally old rows leave. Every missing row takes the
    next name on the ready list whose slot hasn't been used since it was listed. Where the list
    ends, the row stays absent: device slot -1, and it is missing from totals[4]. Nothing that is
    selected leaves for a new row.

    Args:
        host_slots: [T, k] int32, -1 for none; duplicates allowed.
        scores: [T, k] float32; whatever where host_slots is -1.
        layer: in place; totals += distinct rows found, recalled, evicted, written, allocated.
        device_slots: [T, k] int32 out, -1 exactly where host_slots is -1 or no room was left.
        new_rows: at most MOST_NEW_ROWS, appended first; a selection may name them.
        beside: leave most SMs to kernels on other streams.
        lanes: entries of a warp, at most 32; None: by the size of the selection.

    Raises:
        ValueError: too many new rows, or a tensor that isn't as above.
    """
    layer.check()
    device = layer.priority.device
    check_tensor("host_slots", host_slots, (None, None), torch.int32, device=device)
    rows, k = host_slots.shape
    check_tensor("scores", scores, (rows, k), torch.float32, device=device)
    check_tensor("device_slots", device_slots, (rows, k), torch.int32, device=device)
    new = NewRows.none(layer) if new_rows is None else new_rows
    new.check(layer)
    count = new.host_slots.shape[0]
    if count > MOST_NEW_ROWS:
        raise ValueError(f"{count} new rows in one launch; at most {MOST_NEW_ROWS} are possible")
    if (rows == 0 or k == 0) and count == 0:
        return
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    plan = resident_plan(rows, k, sms, lanes, beside=beside)
    appending = append_shared_bytes(plan.threads, count, layer.device_rows.shape[1])
    room = MAX_SHARED_BYTES if plan.wide else MAX_SHARED_BYTES // BLOCKS_PER_SM
    staged = count > 0 and appending <= room
    arguments = ResidentArguments(
        layer_of(layer), rows_to_append(new, layer, each=max(1, count), staged=staged),
        pointer(host_slots), pointer(scores), pointer(device_slots), k,
        plan.tiles, plan.tiles_per_row, plan.lanes, plan.movers,
        moves_16_bytes(layer.host_rows, layer.device_rows), stretch_of(layer),
    )  # fmt: skip
    kernel = "make_resident" if plan.tiles == plan.blocks else "make_many_resident"
    shared_bytes = max(resident_shared_bytes(plan.threads), appending if staged else 0)
    MODULE.launch(
        f"{kernel}_beside" if plan.wide else kernel, arguments, device,
        blocks=plan.blocks + (count > 0), early=EARLY,
        shared_bytes=MAX_SHARED_BYTES if plan.wide else shared_bytes,
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
    blocks = min(-(-entries // (MODULE.threads // 32)), _GATHER_BLOCKS)
    MODULE.launch("gather_rows", arguments, device, blocks=blocks)


def resident_shared_bytes(threads: int) -> int:
    """sizeof(RecallShared) for blocks of so many threads."""
    return 4 * (2 * threads // 32 + 8 + _STRETCHES + 2 * threads)


def stretch_of(layer: FusedLayer) -> int:
    """Host slots of a stretch: a block moves its rows in the order of these."""
    return max(1, -(-layer.host_rows.shape[0] // _STRETCHES))


@dataclass(frozen=True, kw_only=True)
class ResidentPlan:
    """How a selection is cut up: a tile is one block's share, of one row."""

    tiles: int
    tiles_per_row: int
    lanes: int  # entries of a warp
    blocks: int
    threads: int  # of a block
    movers: int  # warps of a block that move rows
    wide: bool  # whether each block has its SM for itself

    @classmethod
    def of(
        cls, rows: int, k: int, lanes: int, most_blocks: int, threads: int, *, wide: bool = False
    ) -> Self:
        """Tiles of so many lanes by at most so many blocks."""
        warps = threads // 32
        tiles_per_row = -(-k // (warps * lanes))
        tiles = rows * tiles_per_row
        return cls(
            tiles=tiles,
            tiles_per_row=tiles_per_row,
            lanes=lanes,
            blocks=min(tiles, most_blocks),
            threads=threads,
            movers=min(MOVERS, warps) if wide else warps,
            wide=wide,
        )


def resident_plan(
    rows: int, k: int, sms: int, lanes: int | None = None, *, beside: bool = False
) -> ResidentPlan:
    """Few entries a warp, since a warp copies what its own entries miss; one block an SM if it can.

    All blocks are resident at once, and one that appends with them, which the wait inside relies
    on. Beside other kernels, a selection that is no larger than a block's threads a few times is
    looked up on all SMs all the same: little of it can be missing.
    """
    wide = beside and rows * k > _FEW_ENTRIES
    at_once = sms  # tiles, one an SM
    if wide:
        tiles = rows * -(-k // WIDE_THREADS)
        at_once = max(1, sms // ONE_SM_IN, min(tiles, sms // MOST_IN))
    most = at_once if wide else BLOCKS_PER_SM * sms - 1
    threads = WIDE_THREADS if wide else MODULE.threads
    for width in (4, 8, 16, 32) if lanes is None else (lanes,):
        plan = ResidentPlan.of(rows, k, width, most, threads, wide=wide)
        if plan.tiles <= at_once:
            break
    return plan
