"""From logits to tokens on the device: fixed shapes, no host, the same code eager and captured.

The sampler's rules (temperature, min-p, top-k, top-p, one uniform number a token) as tensor
arithmetic. A row's token depends on its logits and its own parameters alone, to the last bit:
probabilities are integers, whose sums come out the same in any order, and every method draws in
the order of token ids. So a method may be chosen for a whole batch by what its rows need.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

MAX_CANDIDATES = 1024
"""Largest top_k for which a row needs no sort of the whole vocabulary."""

MAX_ENDS = 8
"""Most tokens of a row that can be suppressed before its min_tokens in fixed-shape tensors."""

ALL_TOKENS = 2**31 - 1
"""A top_k that keeps every token."""

_ROWS_AT_ONCE = 16
"""Rows that are drawn together: bounds the scratch memory, some 60 bytes a row and token."""

_GROUP = 128
"""Tokens that are summed together before sums are."""

TopK = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""`Kernels.topk`: exact, ties to the lower token id."""


class Method(IntEnum):
    """How a batch is drawn; each method serves all the rows that a lower one serves."""

    GREEDY = 0  # argmax
    PLAIN = 1  # temperature and min-p; tokens can be suppressed
    CANDIDATES = 2  # also top_k up to MAX_CANDIDATES, with any top_p
    SORTED = 3  # anything


@dataclass(frozen=True)
class DrawInputs:
    """What the rows of a batch ask, as tensors of fixed shape."""

    numbers: Tensor  # [S, 5] float64: the columns of COLUMNS
    ends: Tensor  # [S, MAX_ENDS] int32: token ids that must not be drawn, -1 for none

    def rows(self, which: slice) -> "DrawInputs":
        """Some of the rows."""
        return DrawInputs(self.numbers[which], self.ends[which])


COLUMNS = ("temperature", "top_k", "top_p", "min_p", "uniform")
"""Columns of `DrawInputs.numbers`; temperature 0 is greedy, top_k at least 1."""

GREEDY_ROW = (0.0, 1.0, 1.0, 0.0, 0.0)
"""A row of `DrawInputs.numbers` that takes the most likely token; what padding holds."""

Described = tuple[tuple[float, ...], list[int]]
"""One row on the CPU: its `DrawInputs.numbers`, and the tokens that must not be drawn."""


def draw(logits: Tensor, inputs: DrawInputs, method: Method, topk: TopK) -> Tensor:
    """The next token of each row.

    Args:
        logits: [S, V] float32, contiguous, not modified.
        inputs: S rows; read by every method but GREEDY.
        method: at least what the rows need (`Method`).
        topk: the backend's exact top-k, used by CANDIDATES.

    Returns:
        [S] int64.
    """
    if method is Method.GREEDY:
        return logits.argmax(dim=-1)
    pieces = [slice(at, at + _ROWS_AT_ONCE) for at in range(0, logits.shape[0], _ROWS_AT_ONCE)]
    return torch.cat(
        [_draw_rows(logits[piece], inputs.rows(piece), method, topk) for piece in pieces]
    )


def _draw_rows(logits: Tensor, inputs: DrawInputs, method: Method, topk: TopK) -> Tensor:
    logits = _without_ends(logits, inputs.ends)
    best, greedy = logits.max(dim=-1, keepdim=True)
    temperature, top_k, top_p, min_p, uniform = inputs.numbers.unsqueeze(1).unbind(-1)  # [S, 1]
    # Subtracting the maximum first keeps a tiny temperature from overflowing to inf - inf.
    distance = (logits - best).double() / temperature.clamp(min=1e-6)
    shares = distance.exp_()  # of the likeliest token's probability
    scale = float(2 ** weight_bits(logits.shape[1]))
    # Rounded to integers: every sum below is exact, so it doesn't depend on order or width.
    weights = torch.where(shares < min_p, 0.0, shares.mul(scale).round_()).long()
    if method is Method.SORTED:
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        weights = _truncate(weights, logits, order, top_k, top_p)
    tokens = _invert(weights, uniform)
    if method is Method.CANDIDATES:
        among = _among_candidates(logits, weights, inputs, topk)
        tokens = torch.where(top_k <= MAX_CANDIDATES, among, tokens)
    return torch.where(temperature == 0, greedy, tokens).squeeze(1)


def weight_bits(vocab: int) -> int:
    """Bits of the likeliest token's weight: those of a float64, less what summing adds.

    With 129,280 tokens a token has weight 0, and is never drawn, below 2^-37 (7e-12) of the
    likeliest one's probability.
    """
    return 53 - (vocab - 1).bit_length()


def _without_ends(logits: Tensor, ends: Tensor) -> Tensor:
    value = torch.where(ends < 0, torch.inf, -torch.inf).to(logits.dtype)
    return logits.scatter_reduce(1, ends.clamp(min=0).long(), value, "amin")


def _among_candidates(logits: Tensor, weights: Tensor, inputs: DrawInputs, topk: TopK) -> Tensor:
    """Draw from the most likely MAX_CANDIDATES tokens: [S, 1], right where top_k is no more."""
    rows, vocab = logits.shape
    lengths = torch.full((rows,), vocab, dtype=torch.int32, device=logits.device)
    candidates = topk(logits, lengths, min(MAX_CANDIDATES, vocab))[0].long()  # ascending ids
    logits, weights = logits.gather(1, candidates), weights.gather(1, candidates)
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    _, top_k, top_p, _, uniform = inputs.numbers.unsqueeze(1).unbind(-1)
    kept = _truncate(weights, logits, order, top_k, top_p)
    return candidates.gather(1, _invert(kept, uniform))


def _truncate(
    weights: Tensor, logits: Tensor, order: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    """Zero what top-k, then top-p leave out.

    Args:
        weights: [S, W] int64 in the order of token ids.
        logits: [S, W].
        order: [S, W] int64: indices of both, most likely first, ties by the lower index.
        top_k: [S, 1].
        top_p: [S, 1]; of the mass that top-k kept.
    """
    ids = torch.arange(order.shape[1], device=order.device)
    ranked = torch.where(ids < top_k, weights.gather(1, order), 0)
    share = ranked.sum(dim=-1, keepdim=True) * top_p  # sums are below 2^53
    # The last one kept is the first whose cumulative weight reaches the share.
    last = order.gather(1, _first_above(ranked, share.ceil().long() - 1))
    bound = logits.gather(1, last)
    return torch.where((logits > bound) | ((logits == bound) & (ids <= last)), weights, 0)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds uniform's share of the whole: [S, 1]."""
    total = weights.sum(dim=-1, keepdim=True)
    return _first_above(weights, (uniform * total).long().minimum(total - 1))


def _first_above(weights: Tensor, target: Tensor) -> Tensor:
    """The first index where the sum of [S, W] int64 up to and with it exceeds [S, 1]: [S, 1].

    In two levels, as a running sum over a whole row is slow on a GPU. W - 1 where none does.
    """
    rows, width = weights.shape
    groups = torch.nn.functional.pad(weights, (0, -width % _GROUP)).view(rows, -1, _GROUP)
    sums = groups.sum(dim=-1)
    ends = sums.cumsum(dim=-1)
    group = torch.searchsorted(ends, target, right=True).clamp(max=sums.shape[1] - 1)
    left = target - (ends - sums).gather(1, group)
    members = groups.gather(1, group.unsqueeze(2).expand(-1, 1, _GROUP)).squeeze(1)
    member = torch.searchsorted(members.cumsum(dim=-1), left, right=True)
    return (group * _GROUP + member).clamp(max=width - 1)
