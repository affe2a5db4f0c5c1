"""Back new rows up to the host pool and refresh their resident copies, one warp a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.cache_args import check_entries, check_pools
from echokv.kernels.checks import check_tensor
from echokv.kernels.triton.row_words import ROWS_PER_PROGRAM, as_words, padded_words


@triton.jit
def _write_rows(
    rows,
    host_slots,
    host_to_device,
    host_rows,
    device_rows,
    entries,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,  # a row
    PADDED: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(host_slots + row, mask=row < entries, other=-1)
    where = slot.to(tl.int64)
    device_slot = tl.load(host_to_device + where, mask=slot >= 0, other=-1)
    word = tl.arange(0, PADDED)
    in_row = (word < WORDS)[None, :]
    written = (slot >= 0)[:, None] & in_row
    resident = (device_slot >= 0)[:, None] & in_row
    values = tl.load(rows + row.to(tl.int64)[:, None] * WORDS + word[None, :], mask=written)
    tl.store(host_rows + where[:, None] * WORDS + word[None, :], values, mask=written)
    tl.store(
        device_rows + device_slot.to(tl.int64)[:, None] * WORDS + word[None, :],
        values,
        mask=resident,
    )


def write_rows(
    rows: Tensor,
    host_slots: Tensor,
    host_to_device: Tensor,
    host_rows: Tensor,
    device_rows: Tensor,
) -> None:
    """Write each row to host, and to the device where resident; see `reference.write_rows`."""
    device, slots = device_rows.device, host_rows.shape[0]
    check_pools(host_rows, device_rows)
    check_entries(device, host_slots)
    entries = host_slots.shape[0]
    check_tensor("rows", rows, (entries, device_rows.shape[1]), torch.uint8, device=device)
    check_tensor("host_to_device", host_to_device, (slots,), torch.int32, device=device)
    if entries == 0:
        return
    # All three as words, or none: a slice of rows may begin at an odd address.
    parts = [as_words(part) for part in (rows, host_rows, device_rows)]
    if len({part.dtype for part in parts}) > 1:
        parts = [rows, host_rows, device_rows]
    _write_rows[(triton.cdiv(entries, ROWS_PER_PROGRAM),)](
        parts[0],
        host_slots,
        host_to_device,
        parts[1],
        parts[2],
        entries,
        ROWS=ROWS_PER_PROGRAM,
        WORDS=parts[0].shape[1],
        PADDED=padded_words(parts[0]),
        num_warps=ROWS_PER_PROGRAM,
    )


COMPILE_SIGNATURES = (
    (
        _write_rows,
        dict.fromkeys(("rows", "host_slots", "host_to_device", "host_rows", "device_rows"), "*i32")
        | {"entries": "i32", "ROWS": ROWS_PER_PROGRAM, "WORDS": 164, "PADDED": 256},
    ),
)
