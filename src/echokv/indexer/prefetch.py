"""Intra-query prefetch (ECHO paper, section 5.1): rows move while the top-k is being found.

Once a decode step's scores are there, rows that beat the predicted k-th score and aren't resident
are fetched on a side stream. The exact top-k then decides what is attended, and `make_resident`
fetches what is still missing: a wrong prediction costs time, never a token.

docs/prefetch.md has the protocol, and why prefill doesn't prefetch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from echokv.cache.batch import ForwardBatch
from echokv.cache.manager import CacheManager
from echokv.indexer.threshold import Predictions
from echokv.kernels.prefetch_args import BUDGET_UNIT, row_budget
from echokv.kernels.protocol import FusedPrefetch, Kernels
from echokv.memory.formats import RowFormat
from echokv.memory.slots import NO_SLOT, HostSlots

ROW_BYTES_PER_TOKEN = 1.64
"""Bytes that PCIe moves while the indexer reads one token's key: 0.0025 rows of 656 B, 0.0014 of
1152 B, at 52 GB/s against 132 B at 4.2 TB/s."""

LEAST_ROWS = 16
"""Budget of a request whose context is short."""

LEAST_SCORED = 0
"""Tokens that a pass must score, at most requests x the bound on their contexts, for prefetch to be
worth its launches; known before a graph is captured."""


@dataclass(frozen=True, kw_only=True)
class PrefetchBudget:
    """Most rows that a request may prefetch in one layer and step."""

    rows_per_unit: int  # for each BUDGET_UNIT tokens of context
    least: int  # whatever the context

    @classmethod
    def of(cls, fmt: RowFormat) -> "PrefetchBudget":
        """As many as PCIe moves while the indexer scores the context."""
        return cls(
            rows_per_unit=round(ROW_BYTES_PER_TOKEN * BUDGET_UNIT / fmt.row_bytes), least=LEAST_ROWS
        )


@dataclass(frozen=True)
class _Lists:
    """What one layer's prefetch finds."""

    host_slots: Tensor  # [T, most] int32: fetched ones; negative elsewhere
    scores: Tensor  # [T, most] float32, of the candidates
    counts: Tensor  # [T] int32: candidates

    @classmethod
    def empty(cls, rows: int, most: int, device: torch.device) -> "_Lists":
        """Nothing found."""
        return cls(
            torch.full((rows, most), NO_SLOT, dtype=torch.int32, device=device),
            torch.empty((rows, most), dtype=torch.float32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )


class Prefetcher:
    """Starts a pass's prefetches, and learns from what the top-k then says.

    Args:
        kernels: the backend.
        cache: what rows are fetched into; its side stream is where the work runs.
        predictions: of the layers that have an indexer.
        budget: rows a request.
        index_layers: decoder layer of each index layer. Layers that share the selection of
            another aren't prefetched: attention asks for their rows long after.
        topk: entries of a selection.
    """

    def __init__(
        self,
        kernels: Kernels,
        cache: CacheManager,
        predictions: Predictions,
        budget: PrefetchBudget,
        index_layers: tuple[int, ...],
        topk: int,
    ) -> None:
        self.predictions = predictions
        self._kernels = kernels
        self._cache = cache
        self._budget = budget
        self._index_layers = index_layers
        self._topk = topk
        self._most = 0  # columns of this pass's lists; 0: it has none
        self._lists: _Lists | None = None  # of the layer whose scores are being made or used
        self._fused = kernels.fused_prefetch
        layer = cache.fused_layer(0)
        if layer is None or self._fused is None or not self._fused.fetches_rows_of(layer):
            self._fused = None

    def rows_per_request(self, batch: ForwardBatch) -> int:
        """Columns of candidates in this pass, from what is known before it runs; 0: no prefetch.

        All rows that may be prefetched, selected or written in one pass fit the device pool
        together, so that no prediction can take the room that the selection needs.
        """
        if not batch.is_decode:
            return 0
        tokens, capacity = batch.num_real_tokens, self._cache.capacity
        if tokens * batch.max_context_len < LEAST_SCORED:
            return 0
        # Whatever is fetched belongs to the contexts: where all of those fit, everything does.
        taken = 0 if batch.num_context_rows <= capacity else tokens * (self._topk + 1)
        most = min((capacity - taken) // tokens, batch.max_context_len)
        budget = self._budget
        return max(0, row_budget(batch.max_context_len, most, budget.rows_per_unit, budget.least))

    def prepare(self, batch: ForwardBatch) -> None:
        """Make room for what one layer's prefetch will find; before the layer's scores are made.

        Without this call `start` and `learn` do nothing; nor do they where nothing may be fetched.

        Args:
            batch: any pass.
        """
        self._most, rows = self.rows_per_request(batch), batch.num_real_tokens
        if self._most == 0:
            return
        with self._cache.side.fork():
            if self._fused is not None:
                self._lists = _Lists.empty(rows, self._most, self.predictions.thresholds.device)

    def start(self, index_layer: int, scores: Tensor, batch: ForwardBatch) -> None:
        """Begin to fetch what the predictions name, on the side stream.

        Args:
            index_layer: place among the layers that have an indexer.
            scores: [T, W] float32 of all rows of the pass.
            batch: the pass that was prepared for.
        """
        if self._most == 0:
            return
        with self._cache.side.fork(scores):
            if self._fused is None:
                self._lists = self._fetch(index_layer, scores, batch)
            else:
                self._fetch_fused(self._fused, index_layer, scores, batch)

    def _fetch(self, index_layer: int, scores: Tensor, batch: ForwardBatch) -> _Lists:
        """Op by op."""
        layer, real = self._index_layers[index_layer], batch.num_real_tokens
        assert batch.request_slots is not None
        found = self._kernels.prefetch_candidates(
            scores[:real],
            batch.context_lens[:real],
            batch.block_tables,
            batch.request_rows[:real],
            batch.request_slots[:real],
            self.predictions.thresholds[index_layer],
            self.predictions.enabled[index_layer],
            self._cache.state.host_to_device[layer],
            most=self._most,
            rows_per_unit=self._budget.rows_per_unit,
            least=self._budget.least,
        )
        lists = _Lists(*found)
        self._cache.prefetch(layer, HostSlots(lists.host_slots))
        return lists

    def _fetch_fused(
        self, fused: FusedPrefetch, index_layer: int, scores: Tensor, batch: ForwardBatch
    ) -> None:
        """In one launch."""
        layer, real, lists = self._index_layers[index_layer], batch.num_real_tokens, self._lists
        target = self._cache.fused_layer(layer)
        assert lists is not None and target is not None and batch.request_slots is not None
        fused.fetch_ahead(
            scores[:real],
            batch.context_lens[:real],
            batch.block_tables,
            batch.request_rows[:real],
            batch.request_slots[:real],
            self.predictions.thresholds[index_layer],
            self.predictions.enabled[index_layer],
            target,
            lists.host_slots,
            lists.scores,
            lists.counts,
            rows_per_unit=self._budget.rows_per_unit,
            least=self._budget.least,
        )
        self._cache.note_prefetch(layer, lists.host_slots)

    def learn(self, index_layer: int, kth_scores: Tensor, batch: ForwardBatch) -> None:
        """Compare the predictions of the layer that was started with the truth.

        Args:
            index_layer: place among the layers that have an indexer.
            kth_scores: [T] float32 of all rows of the pass.
            batch: the pass.
        """
        lists, self._lists = self._lists, None
        if lists is None:
            return
        real, slots = batch.num_real_tokens, batch.request_slots
        assert slots is not None
        predictions = self.predictions
        self._cache.side.later(
            lambda: self._kernels.update_thresholds(
                slots[:real],
                kth_scores[:real],
                lists.scores,
                lists.counts,
                predictions.thresholds[index_layer],
                predictions.usefulness[index_layer],
                predictions.enabled[index_layer],
            )
        )
