"""Back new rows up to the host pool and refresh their resident copies (plain PyTorch)."""

import torch
from torch import Tensor

from echokv.kernels.cache_args import check_entries, check_pools
from echokv.kernels.checks import check_tensor


def write_rows(
    rows: Tensor,
    host_slots: Tensor,
    host_to_device: Tensor,
    host_rows: Tensor,
    device_rows: Tensor,
) -> None:
    """Write each row to its host slot, and to its device slot when it is resident.

    Args:
        rows: [T, row_bytes] uint8.
        host_slots: [T] int32, -1 for rows to skip; else distinct.
        host_to_device: [N_H] int32, -1 for absent.
        host_rows: [N_H, row_bytes] uint8, host memory that the device can write.
        device_rows: [N_G, row_bytes] uint8.
    """
    device, host_size = device_rows.device, host_rows.shape[0]
    check_pools(host_rows, device_rows)
    check_entries(device, host_slots)
    check_tensor(
        "rows", rows, (host_slots.shape[0], device_rows.shape[1]), torch.uint8, device=device
    )
    check_tensor("host_to_device", host_to_device, (host_size,), torch.int32, device=device)
    written = host_slots >= 0
    slots, rows = host_slots[written].long(), rows[written]
    host_rows[slots.to(host_rows.device)] = rows.to(host_rows.device)
    device_slots = host_to_device[slots]
    resident = device_slots >= 0
    device_rows[device_slots[resident].long()] = rows[resident]
