"""Rows worth fetching before the top-k is known: scores that beat a prediction (plain PyTorch)."""

import torch
from torch import Tensor

from echokv.kernels.prefetch_args import check_candidates_args, row_budget
from echokv.memory.slots import BLOCK_TOKENS, NO_SLOT


def prefetch_candidates(
    scores: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    request_rows: Tensor,
    request_slots: Tensor,
    thresholds: Tensor,
    limits: Tensor,
    host_to_device: Tensor,
    *,
    most: int,
    rows_per_unit: int,
    least: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Absent rows whose score is at least the predicted k-th score, lowest positions first.

    A row finds at most row_budget(context_len, most, rows_per_unit, least, limit) of them, and none
    without a prediction: a threshold of +inf or NaN, or a request slot of -1. Scores of NaN beat
    nothing; what lies at or past context_len is ignored.

    Args:
        scores: [T, W] float32.
        context_lens: [T] int32, at most W.
        block_tables: [R, B] int32 host block ids.
        request_rows: [T] int32, each row's row of block_tables.
        request_slots: [T] int32, each row's entry of thresholds and limits; -1 for none.
        thresholds: [S] float32 predicted k-th scores of one layer.
        limits: [S] int32: most rows of each, whatever its budget by length.
        host_to_device: [N_H] int32 of one layer, negative for absent.
        most: columns of the result.
        rows_per_unit: budget for each BUDGET_UNIT tokens of context.
        least: budget of an empty context.

    Returns:
        [T, most] int32 host slots in ascending position, -1 padded; [T, most] float32 their scores,
        -inf padded; [T] int32 how many.
    """
    check_candidates_args(
        scores, context_lens, block_tables, request_rows, request_slots, thresholds, limits,
        host_to_device, most,
    )  # fmt: skip
    rows, device = scores.shape[0], scores.device
    host_slots = torch.full((rows, most), NO_SLOT, dtype=torch.int32, device=device)
    found = torch.full((rows, most), -torch.inf, device=device)
    counts = torch.zeros(rows, dtype=torch.int32, device=device)
    for row, slot in enumerate(request_slots.tolist()):
        if slot < 0 or not thresholds[slot] < torch.inf:
            continue
        length = int(context_lens[row])
        positions = (scores[row, :length] >= thresholds[slot]).nonzero().squeeze(1)
        blocks = block_tables[request_rows[row]][positions // BLOCK_TOKENS]
        slots = blocks * BLOCK_TOKENS + (positions % BLOCK_TOKENS)
        absent = (host_to_device[slots.long()] < 0).nonzero().squeeze(1)
        absent = absent[: row_budget(length, most, rows_per_unit, least, int(limits[slot]))]
        count = absent.shape[0]
        host_slots[row, :count] = slots[absent].to(torch.int32)
        found[row, :count] = scores[row][positions[absent]]
        counts[row] = count
    return host_slots, found, counts
