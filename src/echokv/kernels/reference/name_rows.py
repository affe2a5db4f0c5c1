"""A selection's addresses and scores: positions to host slots through the block tables."""

import torch
from torch import Tensor

from echokv.kernels.checks import check_tensor
from echokv.memory.slots import BLOCK_TOKENS, NO_SLOT, HostSlots


def name_rows(
    positions: Tensor, scores: Tensor, request_rows: Tensor, block_tables: Tensor
) -> tuple[Tensor, Tensor]:
    """Where each selected token's row is, and its score.

    Args:
        positions: [T, k] int32, -1 for none.
        scores: [T, W] float32, by position.
        request_rows: [T] int32: each row's row of block_tables.
        block_tables: [R, B] int32 host block ids.

    Returns:
        [T, k] int32 host slots, -1 where positions is -1; [T, k] float32, -inf there.
    """
    check_name_args(positions, scores, request_rows, block_tables)
    chosen = scores.gather(1, positions.clamp(min=0).long())
    return (
        positions_to_host_slots(positions, request_rows, block_tables),
        chosen.masked_fill(positions < 0, float("-inf")),
    )


def positions_to_host_slots(
    positions: Tensor, request_rows: Tensor, block_tables: Tensor
) -> HostSlots:
    """The first half of `name_rows`, for tools that have no scores.

    Args:
        positions: [T, k] int32, -1 for none.
        request_rows: [T] int32: each row's row of block_tables.
        block_tables: [R, B] int32 host block ids.

    Returns:
        [T, k] int32 host slots, -1 where positions is -1.
    """
    safe = positions.clamp(min=0).long()
    blocks = block_tables[request_rows.long()].gather(1, safe // BLOCK_TOKENS)
    slots = blocks * BLOCK_TOKENS + (safe % BLOCK_TOKENS)
    return HostSlots(torch.where(positions < 0, NO_SLOT, slots).to(torch.int32))


def check_name_args(
    positions: Tensor, scores: Tensor, request_rows: Tensor, block_tables: Tensor
) -> None:
    """Raise ValueError unless `name_rows` can take these."""
    check_tensor("positions", positions, (None, None), torch.int32)
    rows, device = positions.shape[0], positions.device
    check_tensor("scores", scores, (rows, None), torch.float32, device=device)
    check_tensor("request_rows", request_rows, (rows,), torch.int32, device=device)
    check_tensor("block_tables", block_tables, (None, None), torch.int32, device=device)
