"""Above which score rows are surely selected: the k-th by a histogram (plain PyTorch).

Prefill's prediction (ECHO paper, section 5.2): one look at finished scores, no sorting.
"""

import torch
from torch import Tensor

from echokv.kernels.checks import check_tensor

BINS = 256


def score_bounds(
    scores: Tensor, context_lens: Tensor, request_rows: Tensor, shifts: Tensor, k: int
) -> Tensor:
    """The least shifted score of which all that reach it are among a row's k highest.

    A shifted score is a score less its request's shift. Its bin is the upper eight bits of its
    place in the order of floats (NaN as -inf, -0.0 as 0.0), so bins are finest near zero: near the
    k-th score, if that is what the shift predicts. The bound is where the bin of the k-th highest
    ends. Fewer than k scores reach it, unless the row has fewer than k: then all do.

    Args:
        scores: [T, W] float32; what lies at or past context_len is ignored.
        context_lens: [T] int32, at most W.
        request_rows: [T] int32, each row's entry of shifts.
        shifts: [R] float32, predicted k-th scores; one that isn't finite predicts nothing.
        k: entries of a selection, at least 1.

    Returns:
        [T] float32; -inf where there are fewer than k scores, NaN where the k-th is in the highest
        bin.
    """
    check_bounds_args(scores, context_lens, request_rows, shifts, k)
    rows, width = scores.shape
    inside = torch.arange(width, device=scores.device) < context_lens[:, None]
    bins = order_keys(scores - shifts[request_rows.long()][:, None]) >> 24
    counts = torch.zeros((rows, BINS), dtype=torch.int64, device=scores.device)
    counts.scatter_add_(1, bins, inside.long())
    from_top = counts.flip(1).cumsum(1)  # [T, BINS], entry i: scores in bins from BINS - 1 - i on
    above_kth = (from_top < k).sum(1)  # bins above that of the k-th
    bounds = key_floats((BINS - above_kth).clamp(max=BINS - 1) << 24)
    bounds = torch.where(above_kth == 0, torch.nan, bounds)
    return torch.where(above_kth == BINS, -torch.inf, bounds)


def order_keys(values: Tensor) -> Tensor:
    """float32 as int64 in [0, 2^32) of the same order: -0.0 as 0.0, NaN as -inf."""
    values = torch.where(values.isnan(), -torch.inf, values) + 0.0
    bits = values.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    return torch.where(bits >= 1 << 31, bits ^ 0xFFFFFFFF, bits | 1 << 31)


def key_floats(keys: Tensor) -> Tensor:
    """The float32 of each key of `order_keys`."""
    bits = torch.where(keys >= 1 << 31, keys ^ 1 << 31, keys ^ 0xFFFFFFFF)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def check_bounds_args(
    scores: Tensor, context_lens: Tensor, request_rows: Tensor, shifts: Tensor, k: int
) -> None:
    """Raise ValueError unless `score_bounds` can take these."""
    check_tensor("scores", scores, (None, None), torch.float32)
    rows, device = scores.shape[0], scores.device
    check_tensor("context_lens", context_lens, (rows,), torch.int32, device=device)
    check_tensor("request_rows", request_rows, (rows,), torch.int32, device=device)
    check_tensor("shifts", shifts, (None,), torch.float32, device=device)
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
