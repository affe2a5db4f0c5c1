"""Copy missing rows from the host pool, which the GPU reads directly, into device slots.

A fixed grid strides over as many rows as there turn out to be: one warp a row, 16 bytes a lane.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.cache_args import check_entries, check_pools, check_scalars
from echokv.kernels.checks import check_tensor
from echokv.kernels.triton.row_words import ROWS_PER_PROGRAM, as_words, padded_words

_MAX_PROGRAMS = 264  # two for each SM of an H200; 1,056 rows in flight more than fill PCIe


@triton.jit
def _copy_rows(
    host_slots,
    count,
    slot_buffer,
    host_rows,
    device_rows,
    programs,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,  # a row
    PADDED: tl.constexpr,
):
    total = tl.load(count)
    word = tl.arange(0, PADDED)
    first = tl.program_id(0) * ROWS
    while first < total:
        row = first + tl.arange(0, ROWS)
        target = tl.load(slot_buffer + row, mask=row < total, other=-1)
        found = target >= 0
        source = tl.load(host_slots + row, mask=found, other=0)
        mask = found[:, None] & (word < WORDS)[None, :]
        values = tl.load(
            host_rows + source.to(tl.int64)[:, None] * WORDS + word[None, :], mask=mask
        )
        tl.store(
            device_rows + target.to(tl.int64)[:, None] * WORDS + word[None, :], values, mask=mask
        )
        first += programs * ROWS


def recall(
    host_slots: Tensor, count: Tensor, slot_buffer: Tensor, host_rows: Tensor, device_rows: Tensor
) -> None:
    """device_rows[slot_buffer[i]] = host_rows[host_slots[i]]; see `reference.recall`."""
    device, slots = device_rows.device, device_rows.shape[0]
    check_pools(host_rows, device_rows)
    check_entries(device, host_slots)
    check_tensor("slot_buffer", slot_buffer, (slots,), torch.int32, device=device)
    check_scalars(device, count=count)
    source, target = as_words(host_rows), as_words(device_rows)
    programs = min(triton.cdiv(host_slots.shape[0], ROWS_PER_PROGRAM), _MAX_PROGRAMS)
    if programs == 0:
        return
    _copy_rows[(programs,)](
        host_slots,
        count,
        slot_buffer,
        source,
        target,
        programs,
        ROWS=ROWS_PER_PROGRAM,
        WORDS=source.shape[1],
        PADDED=padded_words(source),
        num_warps=ROWS_PER_PROGRAM,
    )


COMPILE_SIGNATURES = (
    (
        _copy_rows,
        dict.fromkeys(("host_slots", "count", "slot_buffer", "host_rows", "device_rows"), "*i32")
        | {"programs": "i32", "ROWS": ROWS_PER_PROGRAM, "WORDS": 164, "PADDED": 256},
    ),
)
