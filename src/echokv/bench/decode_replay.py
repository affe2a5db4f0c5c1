"""Replayed selections: what attention reads, once the real indexer has been paid for.

Random weights select nearly at random, step after step; a trained model's selections overlap.
`ReplaySelector` lets the indexer score and select as ever, then hands out positions of a source
instead, made on the device for all layers at once, so that a captured decode step advances by
itself. Sources: a generator with a turnover a layer (`Turnover`), or a recorded trace
(`decode_trace`).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from echokv.bench.around_indexer import AroundIndexer
from echokv.cache.batch import ForwardBatch
from echokv.errors import ConfigError
from echokv.indexer.indexer import Indexer, Selection
from echokv.memory.slots import BLOCK_TOKENS, NO_SLOT, HostSlots

_MIXER = 0x9E3779B1  # 2**32 over the golden ratio: spreads consecutive numbers (Knuth)


class SelectionSource(Protocol):
    """Makes the selections of a decode step, of every layer that has an indexer."""

    description: str  # for the report
    steps_to_renew: int  # after so many steps at once every row that can move has moved

    def positions(self, steps: Tensor, context_lens: Tensor, requests: Tensor) -> Tensor:
        """Positions to attend; a fixed number of device ops, none of which waits.

        Args:
            steps: [T] int32, a number that grows by one each step of a request.
            context_lens: [T] int32, tokens that the row may select from; 0 for padding.
            requests: [T] int32, any number that tells requests apart and stays theirs.

        Returns:
            [L_index, T, k] int32: distinct, ascending, below context_lens; -1 at the end.
        """
        ...


def salt_of(requests: Tensor) -> Tensor:
    """[T] int32 in [0, 2**15): spreads the numbers that tell requests apart."""
    return ((requests.long() * _MIXER) >> 8 & 0x7FFF).int()


class Turnover:
    """Each step replaces a share of each request's selected rows by others of its context.

    A request's context is cut into k bins of equal width; a selection has one position in each,
    so it is ascending and distinct by construction. A step moves the positions of some bins, a
    fixed number a layer, each bin in its turn; a bin goes through all its positions before one
    comes back. A row that comes back was therefore left a whole context ago, and is missing unless
    the device pool holds nearly the whole context: the hit rate is 1 - turnover (and more, where
    it does). Bins of width one (contexts of less than 2k tokens) never move.

    Args:
        turnover: rows that a step replaces, a layer that has an indexer: each in [0, k].
        topk: k.
        device: where selections are made.
    """

    def __init__(self, turnover: Sequence[int], topk: int, device: torch.device) -> None:
        bad = [rows for rows in turnover if not 0 <= rows <= topk]
        if bad:
            raise ConfigError(f"a turnover of {bad[0]} rows is not within the {topk} selected")
        shares = sorted({rows / topk for rows in turnover})
        self.description = (
            f"generated, {shares[0]:.2%} to {shares[-1]:.2%} of each layer's rows replaced a step"
        )
        self.steps_to_renew = -(-topk // max(1, min(turnover)))
        self._topk = topk
        generator = torch.Generator().manual_seed(0)
        layers = len(turnover)
        # The bins' turns, in an order of each layer's own.
        turns = torch.stack([torch.randperm(topk, generator=generator) for _ in range(layers)])
        starts = torch.randint(2**16, (layers, topk), generator=generator)
        self._turns = turns.to(device, torch.int32)  # [L, k]
        self._starts = starts.to(device, torch.int32)  # [L, k]
        rows = torch.tensor(turnover, dtype=torch.int32, device=device)
        self._rows = rows[:, None, None]  # [L, 1, 1]
        self._bins = torch.arange(topk, dtype=torch.int32, device=device)

    def positions(self, steps: Tensor, context_lens: Tensor, requests: Tensor) -> Tensor:
        """See `SelectionSource`."""
        width = (context_lens // self._topk).clamp(min=1)[:, None]  # [T, 1]
        salt = salt_of(requests)[:, None]
        # How often each bin has moved: once every topk / rows steps.
        turn = steps[:, None] * self._rows + salt  # [L, T, 1]
        moves = (turn + self._turns[:, None]) // self._topk  # [L, T, k]
        offsets = (moves + (self._starts[:, None] + salt)) % width
        positions = self._bins * width + offsets
        return positions.masked_fill(positions >= context_lens[:, None], -1)


class ReplaySelector(AroundIndexer):
    """A `TokenSelector` that pays for the exact selection and hands out a replayed one.

    Prefill passes and layers of padding keep their exact selection. Scores are fixed noise: real
    ones belong to other positions.

    Args:
        exact: the engine's indexer.
        num_layers: layers that have one.
        source: of the positions.
        device: where the model runs.

    Attributes:
        offset: [1] int32 added to every row's step; for graphs that replay fixed inputs.
        steps_to_renew: the source's.
    """

    def __init__(
        self, exact: Indexer, num_layers: int, source: SelectionSource, device: torch.device
    ) -> None:
        super().__init__(exact)
        self.offset = torch.zeros(1, dtype=torch.int32, device=device)
        self.steps_to_renew = source.steps_to_renew
        self.description = source.description
        self._source = source
        self._num_layers = num_layers
        self._scores: dict[int, Tensor] = {}  # by the number of rows
        self._replayed: tuple[Tensor, Tensor] | None = None

    def select(
        self, index_layer: int, query: Tensor, weights: Tensor, batch: ForwardBatch
    ) -> Selection:
        """See `Indexer`; the positions are the source's, whatever the scores are."""
        exact = self._exact.select(index_layer, query, weights, batch)
        if batch.num_real_tokens != batch.block_tables.shape[0]:
            return exact  # several tokens of a request: prefill
        if index_layer == 0:
            self._replayed = self._replay(batch)
        assert self._replayed is not None, "layer 0 comes first in every pass"
        positions, slots = (every[index_layer] for every in self._replayed)
        return Selection(
            positions=positions,
            host_slots=HostSlots(slots),
            scores=self._noise(batch.num_tokens)[index_layer],
            kth_scores=exact.kth_scores,
        )

    def _replay(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Positions and host slots of all layers, each [L_index, T, k]."""
        rows = batch.request_rows.long()
        positions = self._source.positions(
            batch.positions + self.offset, batch.context_lens, batch.block_tables[rows, 0]
        )
        places = positions.clamp(min=0)
        blocks = batch.block_tables[rows[:, None], (places // BLOCK_TOKENS).long()]
        slots = blocks * BLOCK_TOKENS + places % BLOCK_TOKENS
        return positions, slots.masked_fill(positions < 0, NO_SLOT)

    def _noise(self, rows: int) -> Tensor:
        """[L_index, rows, k] float32 in [0, 1), the same at every call."""
        if rows not in self._scores:
            generator = torch.Generator().manual_seed(1)
            noise = torch.rand(self._num_layers, 1, self.topk, generator=generator)
            self._scores[rows] = noise.expand(-1, rows, -1).to(self.offset.device).contiguous()
        return self._scores[rows]


def turnover_rows(hit_rates: Sequence[float], topk: int) -> list[int]:
    """Rows to replace a step for each hit rate."""
    return [round((1.0 - rate) * topk) for rate in hit_rates]


def hit_rates(text: str, num_layers: int) -> list[float]:
    """The hit rate that each layer's selections should have.

    Args:
        text: a number, the same for every layer, or "paper": the rates that the ECHO paper reports
            (0.97 to 0.99 in most layers, 0.95 in one and 0.88 in another; which layers those are
            is not said there, here they are at one and two thirds of the depth).
        num_layers: layers that select.

    Raises:
        ConfigError: neither, or not in [0, 1].
    """
    if text == "paper":
        rates = [0.97 + 0.01 * (layer % 3) for layer in range(num_layers)]
        rates[num_layers // 3] = 0.95
        rates[2 * num_layers // 3] = 0.88
        return rates
    try:
        rate = float(text)
    except ValueError as error:
        raise ConfigError(f"--hit-rate must be a number or paper, got {text!r}") from error
    if not 0.0 <= rate <= 1.0:
        raise ConfigError(f"--hit-rate must be in [0, 1], got {rate}")
    return [rate] * num_layers
