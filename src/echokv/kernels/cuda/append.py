"""New rows in one launch: written to host, and made resident."""

from dataclasses import dataclass

import torch
from torch import Tensor

from echokv.kernels.cuda.launch import Arguments, CudaModule
from echokv.kernels.cuda.layer import (
    BLOCKS_PER_SM,
    EARLY,
    AppendedRows,
    Layer,
    append_shared_bytes,
    layer_of,
    rows_to_append,
)
from echokv.kernels.fused_layer import FusedLayer, NewRows

MODULE = CudaModule("append", threads=512)
KERNELS = ("append_rows",)

_STAGED_BYTES = 100 * 1024  # at most, of a block, for its rows
_ALONE = 64  # rows that one block appends


class AppendArguments(Arguments):
    """See append.cu."""

    _fields_ = (("layer", Layer), ("rows", AppendedRows))


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
    NewRows(host_slots, rows).check(layer)
    device, shape = layer.priority.device, rows.shape
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    plan = append_plan(*shape, sms)
    for start in range(0, shape[0], plan.most):
        part = NewRows(host_slots[start : start + plan.most], rows[start : start + plan.most])
        arguments = AppendArguments(
            layer_of(layer), rows_to_append(part, layer, each=plan.each, staged=plan.staged)
        )
        MODULE.launch(
            "append_rows", arguments, device, blocks=-(-part.host_slots.shape[0] // plan.each),
            shared_bytes=plan.shared_bytes, early=EARLY,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AppendPlan:
    """How new rows are cut up."""

    each: int  # rows of a block
    staged: bool  # whether a block keeps its rows in shared memory
    most: int  # rows of a launch, whose blocks are all resident at once
    shared_bytes: int


def append_plan(rows: int, row_bytes: int, sms: int, threads: int = MODULE.threads) -> AppendPlan:
    """One block for a decode step's rows, as many as there can be for a prefill's."""
    blocks = BLOCKS_PER_SM * sms
    fits = max(1, _STAGED_BYTES // row_bytes)
    wanted = rows if rows <= _ALONE else max(threads // 32, -(-rows // blocks))
    each = min(wanted, threads, fits)
    return AppendPlan(
        each=each,
        staged=row_bytes * each <= _STAGED_BYTES,
        most=each * blocks,
        shared_bytes=append_shared_bytes(threads, each, row_bytes),
    )
