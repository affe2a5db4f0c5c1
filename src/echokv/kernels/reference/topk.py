"""Exact top-k with one canonical answer: score descending, then position ascending."""

import torch
from torch import Tensor

from echokv.kernels.checks import check_tensor
from echokv.kernels.reference.name_rows import name_rows


def topk(scores: Tensor, context_lens: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best tokens of each row; ties on the k-th score go to the lower positions.

    Entries at or past context_len are ignored whatever they hold. -0.0 equals 0.0; a NaN inside
    the context ranks last, with -inf.

    Args:
        scores: [T, W] float32.
        context_lens: [T] int32; more than W counts as W.
        k: how many, at least 1; may exceed W.

    Returns:
        [T, k] int32 positions in ascending position order, -1 at the end of a row with fewer than
        k tokens; and [T] float32 k-th scores, -inf for a row with fewer than k tokens.
    """
    check_topk_args(scores, context_lens, k)
    num_rows, width = scores.shape
    context_lens = context_lens.clamp(max=width)
    valid = torch.arange(width, device=scores.device) < context_lens[:, None]  # [T, W]
    lowest = torch.full((), -torch.inf, device=scores.device)
    ranked = torch.where(valid & ~scores.isnan(), scores, lowest)
    kth = ranked.new_full((num_rows,), -torch.inf)
    if k <= width:
        kth = torch.topk(ranked, k, dim=1, sorted=False).values.amin(dim=1)
    kth = torch.where(context_lens < k, -torch.inf, kth + 0.0)  # -0.0 + 0.0 is 0.0
    chosen = valid & (ranked >= kth[:, None])
    _drop_late_ties(chosen, ranked, kth, k)
    positions = torch.full((num_rows, k), -1, dtype=torch.int32, device=scores.device)
    row, position = chosen.nonzero(as_tuple=True)  # sorted by row, then position
    counts = chosen.sum(dim=1)
    place = torch.arange(row.numel(), device=row.device) - (counts.cumsum(0) - counts)[row]
    positions[row, place] = position.to(torch.int32)
    return positions, kth


def topk_rows(
    scores: Tensor, context_lens: Tensor, k: int, request_rows: Tensor, block_tables: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`topk`, and `name_rows` of what it finds.

    Args:
        scores: [T, W] float32.
        context_lens: [T] int32, as `topk` takes it.
        k: how many, at least 1; may exceed W.
        request_rows: [T] int32: each row's row of block_tables.
        block_tables: [R, B] int32 host block ids, as many as the contexts have.

    Returns:
        [T, k] int32 positions and [T] float32 k-th scores, as `topk` does; [T, k] int32 host slots
        and [T, k] float32 scores, as `name_rows` does: those of NaN and -0.0 as they are.
    """
    check_topk_rows_args(scores, context_lens, k, request_rows, block_tables)
    positions, kth = topk(scores, context_lens, k)
    return positions, kth, *name_rows(positions, scores, request_rows, block_tables)


def _drop_late_ties(chosen: Tensor, ranked: Tensor, kth: Tensor, k: int) -> None:
    """Where more than k are chosen, unchoose the last of those that equal the k-th score."""
    excess = chosen.sum(dim=1) - k
    for row in (excess > 0).nonzero().flatten().tolist():
        tied = (chosen[row] & (ranked[row] == kth[row])).nonzero().flatten()
        chosen[row, tied[tied.numel() - int(excess[row]) :]] = False


def check_topk_args(scores: Tensor, context_lens: Tensor, k: int) -> None:
    """Raise ValueError unless `topk` can take these."""
    check_tensor("scores", scores, (None, None), torch.float32)
    shape = (scores.shape[0],)
    check_tensor("context_lens", context_lens, shape, torch.int32, device=scores.device)
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")


def check_topk_rows_args(
    scores: Tensor, context_lens: Tensor, k: int, request_rows: Tensor, block_tables: Tensor
) -> None:
    """Raise ValueError unless `topk_rows` can take these."""
    check_topk_args(scores, context_lens, k)
    rows, device = (scores.shape[0],), scores.device
    check_tensor("request_rows", request_rows, rows, torch.int32, device=device)
    check_tensor("block_tables", block_tables, (None, None), torch.int32, device=device)
