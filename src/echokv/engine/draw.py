"""From logits to tokens on the device: fixed shapes, no host, the same code eager and captured.

The sampler's rules (temperature, min-p, top-k, top-p, one uniform number a token) as tensor
arithmetic. A row's token depends on its logits and its own parameters alone, to the last bit:
probabilities are integers, whose sums come out the same in any order, and every method draws in
the order of token ids. So a method may be chosen for a whole batch by what its rows need.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import reduce

import torch
from torch import Tensor

from echokv.kernels.protocol import Kernels
from echokv.kernels.reference.token_weights import GROUP, group_sums

MAX_CANDIDATES = 1024
"""Largest top_k for which a row needs no sort of the whole vocabulary."""

MAX_ENDS = 8
"""Most tokens of a row that can be suppressed before its min_tokens in fixed-shape tensors."""

ALL_TOKENS = 2**31 - 1
"""A top_k that keeps every token."""

COLUMNS = ("temperature", "top_k", "top_p", "min_p", "uniform")
"""Rows of `DrawInputs.numbers`; temperature 0 is greedy, top_k at least 1."""

GREEDY = (0.0, 1.0, 1.0, 0.0, 0.0)
"""A column of `DrawInputs.numbers` that takes the most likely token; what padding holds."""

Described = tuple[tuple[float, ...], list[int]]
"""One row on the CPU: its `DrawInputs.numbers`, and the tokens that must not be drawn."""


class Method(IntEnum):
    """How a batch is drawn; `join` gives the one that serves two kinds of rows."""

    GREEDY = 0  # argmax
    PLAIN = 1  # temperature and min-p alone; tokens can be suppressed
    LIMITED = 2  # top_k up to MAX_CANDIDATES, with any min_p and top_p
    MIXED = 3  # rows of both
    SORTED = 4  # anything

    @classmethod
    def join(cls, *methods: "Method") -> "Method":
        """The cheapest method for a batch of rows that need these; every one serves GREEDY."""
        return cls(min(reduce(int.__or__, methods, 0), cls.SORTED))


_ROWS_AT_ONCE = {Method.PLAIN: 64, Method.LIMITED: 64, Method.MIXED: 64, Method.SORTED: 16}
"""Rows that are drawn together: bounds the scratch memory, most of it a sort's."""


@dataclass(frozen=True)
class DrawInputs:
    """What the rows of a batch ask, as tensors of fixed shape."""

    numbers: Tensor  # [5, S] float64, see COLUMNS
    ends: Tensor  # [S, MAX_ENDS] int32: token ids that must not be drawn, -1 for none

    def rows(self, which: slice) -> "DrawInputs":
        """Some of the rows."""
        return DrawInputs(self.numbers[:, which], self.ends[which])


def draw(logits: Tensor, inputs: DrawInputs, method: Method, kernels: Kernels) -> Tensor:
    """The next token of each row.

    Args:
        logits: [S, V] float32, contiguous, not modified.
        inputs: S rows; read by every method but GREEDY.
        method: one that serves all rows.
        kernels: the backend.

    Returns:
        [S] int64.
    """
    if method is Method.GREEDY:
        return logits.argmax(dim=-1)
    step = _ROWS_AT_ONCE[method]
    pieces = [slice(at, at + step) for at in range(0, logits.shape[0], step)]
    return torch.cat(
        [_draw_rows(logits[piece], inputs.rows(piece), method, kernels) for piece in pieces]
    )


def weight_bits(vocab: int) -> int:
    """Bits of the likeliest token's weight: those of a float64, less what summing adds.

    With 129,280 tokens a token has weight 0, and is never drawn, below 2^-37 (7e-12) of the
    likeliest one's probability.
    """
    return 53 - (vocab - 1).bit_length()


def _draw_rows(logits: Tensor, inputs: DrawInputs, method: Method, kernels: Kernels) -> Tensor:
    logits = _without_ends(logits, inputs.ends)
    if method is Method.LIMITED:
        return _draw_among_candidates(logits, inputs, kernels)
    best, greedy = logits.max(dim=-1)
    temperature, top_k, top_p, min_p, uniform = inputs.numbers
    bits = weight_bits(logits.shape[1])
    weights, sums = kernels.token_weights(logits, best, temperature, min_p, bits)
    if method is Method.SORTED:
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        weights = _truncate(weights, logits, order, top_k, top_p)
        sums = group_sums(weights)
    tokens = torch.where(temperature == 0, greedy, _invert(weights, sums, uniform))
    if method is Method.MIXED:
        among = _draw_among_candidates(logits, inputs, kernels)
        tokens = torch.where(top_k <= MAX_CANDIDATES, among, tokens)
    return tokens


def _without_ends(logits: Tensor, ends: Tensor) -> Tensor:
    value = torch.where(ends < 0, torch.inf, -torch.inf).to(logits.dtype)
    return logits.scatter_reduce(1, ends.clamp(min=0).long(), value, "amin")


def _draw_among_candidates(logits: Tensor, inputs: DrawInputs, kernels: Kernels) -> Tensor:
    """Draw from the likeliest MAX_CANDIDATES tokens: [S], right where top_k is no more."""
    rows, vocab = logits.shape
    lengths = torch.full((rows,), vocab, dtype=torch.int32, device=logits.device)
    candidates = kernels.topk(logits, lengths, min(MAX_CANDIDATES, vocab))[0].long()  # ids ascend
    logits = logits.gather(1, candidates)
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    temperature, top_k, top_p, min_p, uniform = inputs.numbers
    best, bits = logits.amax(dim=-1), weight_bits(vocab)
    weights, _ = kernels.token_weights(logits, best, temperature, min_p, bits)
    kept = _truncate(weights, logits, order, top_k, top_p)
    drawn = _invert(kept, group_sums(kept), uniform)
    return candidates.gather(1, drawn.unsqueeze(1)).squeeze(1)


def _truncate(
    weights: Tensor, logits: Tensor, order: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    """Zero what top-k, then top-p leave out.

    Args:
        weights: [S, W] int64 in the order of token ids.
        logits: [S, W].
        order: [S, W] int64: indices of both, most likely first, ties by the lower index.
        top_k: [S].
        top_p: [S]; of the mass that top-k kept.
    """
    ids = torch.arange(order.shape[1], device=order.device)
    ranked = torch.where(ids < top_k.unsqueeze(1), weights.gather(1, order), 0)
    sums = group_sums(ranked)
    share = sums.sum(dim=-1) * top_p  # sums are below 2^53
    # The last one kept is the first whose cumulative weight reaches the share.
    last_rank = _first_above(ranked, sums, share.ceil().long() - 1)
    last = order.gather(1, last_rank.unsqueeze(1))
    bound = logits.gather(1, last)
    return torch.where((logits > bound) | ((logits == bound) & (ids <= last)), weights, 0)


def _invert(weights: Tensor, sums: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds uniform's share of the whole: [S]."""
    total = sums.sum(dim=-1)
    return _first_above(weights, sums, (uniform * total).long().minimum(total - 1))


def _first_above(weights: Tensor, sums: Tensor, target: Tensor) -> Tensor:
    """The first index where the sum of the weights up to and with it exceeds the target.

    In two levels, as a running sum over a whole row is slow on a GPU.

    Args:
        weights: [S, W] int64.
        sums: [S, G] int64, their `group_sums`.
        target: [S] int64.

    Returns:
        [S] int64; W - 1 where the whole sum doesn't exceed the target.
    """
    width = weights.shape[1]
    target = target.unsqueeze(1)
    ends = sums.cumsum(dim=-1)
    group = torch.searchsorted(ends, target, right=True).clamp(max=sums.shape[1] - 1)
    left = target - (ends - sums).gather(1, group)
    index = group * GROUP + torch.arange(GROUP, device=weights.device)  # [S, GROUP]
    members = torch.where(index < width, weights.gather(1, index.clamp(max=width - 1)), 0)
    member = torch.searchsorted(members.cumsum(dim=-1), left, right=True)
    return (group * GROUP + member).clamp(max=width - 1).squeeze(1)
