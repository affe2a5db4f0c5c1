"""Copy missing rows from the host pool into allocated device slots (plain PyTorch)."""

import torch
from torch import Tensor

from echokv.kernels.cache_args import check_entries, check_pools, check_scalars
from echokv.kernels.checks import check_tensor


def recall(
    host_slots: Tensor, count: Tensor, slot_buffer: Tensor, host_rows: Tensor, device_rows: Tensor
) -> None:
    """device_rows[slot_buffer[i]] = host_rows[host_slots[i]] for i < count.

    Args:
        host_slots: [M] int32, M <= N_G.
        count: [1] int32.
        slot_buffer: [N_G] int32, what `allocate` returned; entries of -1 are skipped.
        host_rows: [N_H, row_bytes] uint8, host memory that the device can read.
        device_rows: [N_G, row_bytes] uint8.
    """
    device, slots = device_rows.device, device_rows.shape[0]
    check_pools(host_rows, device_rows)
    check_entries(device, host_slots)
    check_tensor("slot_buffer", slot_buffer, (slots,), torch.int32, device=device)
    check_scalars(device, count=count)
    targets = slot_buffer[: int(count)]
    targets = targets[targets >= 0].long()  # -1 only at the end: see allocate
    sources = host_slots[: targets.shape[0]].long().to(host_rows.device)
    device_rows[targets] = host_rows[sources].to(device_rows.device)
