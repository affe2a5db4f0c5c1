"""What the cache ops of every backend share: argument checks, the workspace's size, the clock.

Knows no backend. The checks look at shapes, dtypes, devices and strides, never at values, so
they neither synchronise nor disturb a graph capture.
"""

import torch
from torch import Tensor

from echokv.kernels.checks import check_tensor

WORKSPACE_INTS = 8192
"""int32 entries of the scratch tensor that `lookup`, `free` and `allocate` take; all zero before
the first use, then only the ops touch it. One a stream; it fits pools of any size."""

SCORE_BITS = 3
"""Low bits of a priority, which rank rows within one step; the clock is the rest."""

SCORE_LEVELS = (1 << SCORE_BITS) - 1
"""Levels that selected rows are ranked in; level 0 is for rows that are only written."""

CLOCK_REBASE_AT = 3 << 26
"""`tick` rebases when the clock gets here: well before 2^28, where a priority would overflow."""

CLOCK_REBASE_KEEP = 1 << 27
"""What the clock becomes then. Rows used in that many last steps keep their order exactly; older
ones all count as equally old."""


def check_layer(
    device_free: Tensor,
    priority: Tensor,
    device_to_host: Tensor,
    host_to_device: Tensor,
    slot_buffer: Tensor,
) -> None:
    """Check the state of one layer: [N_G] tensors and host_to_device [N_H], on one device."""
    slots, device = priority.shape[0], priority.device
    check_tensor("priority", priority, (slots,), torch.int32)
    check_tensor("device_free", device_free, (slots,), torch.uint8, device=device)
    check_tensor("device_to_host", device_to_host, (slots,), torch.int32, device=device)
    check_tensor("slot_buffer", slot_buffer, (slots,), torch.int32, device=device)
    check_tensor("host_to_device", host_to_device, (None,), torch.int32, device=device)


def check_scalars(device: torch.device, **scalars: Tensor) -> None:
    """Check int32 [1] tensors that live on `device`: counts and floors."""
    for name, scalar in scalars.items():
        check_tensor(name, scalar, (1,), torch.int32, device=device)


def check_workspace(workspace: Tensor, device: torch.device) -> None:
    """Check the scratch tensor."""
    check_tensor("workspace", workspace, (WORKSPACE_INTS,), torch.int32, device=device)


def check_entries(device: torch.device, host_slots: Tensor, **others: Tensor) -> None:
    """Check host_slots [M] int32 and other tensors of the same shape and dtype."""
    check_tensor("host_slots", host_slots, (None,), torch.int32, device=device)
    for name, other in others.items():
        check_tensor(name, other, (host_slots.shape[0],), torch.int32, device=device)


def check_maps(host_to_device: Tensor, priority: Tensor) -> None:
    """Check host_to_device [N_H] and priority [N_G], both int32."""
    check_tensor("priority", priority, (None,), torch.int32)
    check_tensor("host_to_device", host_to_device, (None,), torch.int32, device=priority.device)


def check_pools(host_rows: Tensor, device_rows: Tensor) -> None:
    """Check one layer of both pools; host_rows may live in host memory that the device reads."""
    check_tensor("device_rows", device_rows, (None, None), torch.uint8)
    check_tensor("host_rows", host_rows, (None, device_rows.shape[1]), torch.uint8)


def check_release(
    host_slots: Tensor,
    device_free: Tensor,
    priority: Tensor,
    device_to_host: Tensor,
    host_to_device: Tensor,
) -> None:
    """Check host_slots [M] and the stacked state: [L, N_G] tensors and host_to_device [L, N_H]."""
    device = priority.device
    check_tensor("priority", priority, (None, None), torch.int32)
    stacked = tuple(priority.shape)
    check_tensor("device_free", device_free, stacked, torch.uint8, device=device)
    check_tensor("device_to_host", device_to_host, stacked, torch.int32, device=device)
    check_tensor("host_to_device", host_to_device, (stacked[0], None), torch.int32, device=device)
    check_entries(device, host_slots)


def check_priorities(clock: Tensor, scores: Tensor, host_slots: Tensor, priorities: Tensor) -> None:
    """Check clock [1] and the [T, k] tensors of one selection."""
    device, shape = host_slots.device, tuple(host_slots.shape)
    check_tensor("host_slots", host_slots, (None, None), torch.int32)
    check_tensor("scores", scores, shape, torch.float32, device=device)
    check_tensor("priorities", priorities, shape, torch.int32, device=device)
    check_scalars(device, clock=clock)
