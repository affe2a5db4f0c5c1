"""Intra-query prefetch (ECHO paper, section 5.1): rows move before they are selected.

In a decode step, rows that beat the predicted k-th score and aren't resident are fetched on a side
stream, while scores are made where the backend can, and while the top-k is found. The exact top-k
then decides what is attended, and `make_resident` fetches what is still missing: a wrong prediction
costs time, never a token.

docs/prefetch.md has the protocol. Prefill passes are `indexer.prefill_prefetch`'s.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from echokv.cache.batch import ForwardBatch
from echokv.cache.manager import CacheManager
from echokv.indexer.prefill_prefetch import PrefillPrefetcher
from echokv.indexer.threshold import Predictions
from echokv.kernels.prefetch_args import BUDGET_UNIT, Candidates, LayerPrefetch, row_budget
from echokv.kernels.protocol import Kernels
from echokv.memory.formats import IndexKeyFormat, RowFormat
from echokv.memory.sizes import LEAST_PREFETCH_ROWS, PREFETCH_BYTES_PER_TOKEN
from echokv.memory.slots import HostSlots


@dataclass(frozen=True, kw_only=True)
class PrefetchBudget:
    """Most rows that a request may prefetch in one layer and step."""

    rows_per_unit: int  # for each BUDGET_UNIT tokens of context
    least: int  # whatever the context

    @classmethod
    def of(cls, fmt: RowFormat) -> "PrefetchBudget":
        """As many as could move while one long context among short ones is scored and selected."""
        return cls(
            rows_per_unit=round(PREFETCH_BYTES_PER_TOKEN * BUDGET_UNIT / fmt.row_bytes),
            least=LEAST_PREFETCH_ROWS,
        )


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """What the fused prefetches of a pass find, L index layers after each other."""

    found: Candidates  # of [L * T] rows
    kth_scores: Tensor  # [L, T] float32


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
        prefill: prefetch in prefill passes too.
    """

    def __init__(
        self,
        kernels: Kernels,
        cache: CacheManager,
        predictions: Predictions,
        budget: PrefetchBudget,
        index_layers: tuple[int, ...],
        topk: int,
        *,
        prefill: bool = True,
    ) -> None:
        self.predictions = predictions
        self._kernels = kernels
        self._cache = cache
        self._budget = budget
        self._index_layers = index_layers
        self._topk = topk
        self._most = 0  # columns of this pass's candidates; 0: it has none
        self._found: Candidates | None = None  # op by op, in the layer whose scores are being used
        self._pass: _Pass | None = None
        self._fused = None if kernels.scheduled_scores is not None else kernels.fused_prefetch
        device = predictions.thresholds.device
        self.prefill = PrefillPrefetcher(
            self._fused if prefill else None, cache, predictions, index_layers, topk
        )
        """The same for passes that aren't decode passes."""
        self._lists = None if self._fused is None else self._fused.candidate_lists(device)
        self._decoder_layers = torch.tensor(index_layers, dtype=torch.int32, device=device)
        layers, request_slots = predictions.thresholds.shape
        firsts = torch.arange(layers, dtype=torch.int32, device=device) * request_slots
        self._first_entries = firsts[:, None]  # [L, 1] of each layer in the predictions

    def rows_ahead(self, batch: ForwardBatch) -> int:
        """Most rows that a layer of any pass may fetch, all requests together."""
        if batch.is_decode:
            return batch.num_real_tokens * self.rows_per_request(batch)
        return self.prefill.rows_ahead(batch)

    def rows_per_request(self, batch: ForwardBatch) -> int:
        """Columns of candidates in this pass, from what is known before it runs; 0: no prefetch.

        All rows that may be prefetched, selected or written in one pass fit the device pool
        together, so that no prediction can take the room that the selection needs. (Nor the names
        of slots: a prefetch takes one for each row, and if that slot isn't free, it is lost.)
        """
        if not batch.is_decode:
            return 0
        tokens, capacity = batch.num_real_tokens, self._cache.capacity
        taken = min(tokens * (self._topk + 1), batch.num_context_rows)
        most = min((capacity - taken) // tokens, batch.max_context_len)
        budget = self._budget
        return max(0, row_budget(batch.max_context_len, most, budget.rows_per_unit, budget.least))

    def begin_pass(self, batch: ForwardBatch) -> None:
        """Decide whether a pass prefetches; before its first layer.

        Args:
            batch: any pass.
        """
        self._most, self._pass = self.rows_per_request(batch), None
        self.prefill.begin_pass(batch)

    @property
    def is_on(self) -> bool:
        """Whether this pass prefetches: then its layers go through `score` to `learn`."""
        return self._most > 0

    def score(
        self,
        index_layer: int,
        query: Tensor,
        weights: Tensor,
        pages: Tensor,
        fmt: IndexKeyFormat,
        batch: ForwardBatch,
    ) -> Tensor | None:
        """Scores of a layer while rows move, on a stream beside, that they name.

        Args:
            index_layer: place among the layers that have an indexer.
            query: [T, H, D] of all rows of the pass; the rest as `Kernels.index_scores` takes it.
            weights: [T, H] float32.
            pages: [n_pages, page_bytes] uint8 of the layer.
            fmt: of the pages.
            batch: the pass.

        Returns:
            [T, W] float32; None where the backend can't: then `start` has the scores fetched.
        """
        fused, layer = self._fused, self._index_layers[index_layer]
        target = self._cache.fused_layer(layer)
        if target is None or fused is None or not fused.fetches(query, pages, fmt, target):
            return None
        here = self._pass or self._begin_fused(batch)
        assert self._lists is not None and batch.request_slots is not None
        rows = batch.num_tokens
        prefetch = LayerPrefetch(
            layer=target,
            request_slots=batch.request_slots,
            thresholds=self.predictions.thresholds[index_layer],
            limits=self.predictions.limits[index_layer],
            lists=self._lists,
            found=here.found.rows(index_layer * rows, (index_layer + 1) * rows),
            kth_scores=here.kth_scores[index_layer],
            rows_per_unit=self._budget.rows_per_unit,
            least=self._budget.least,
        )
        return fused.index_scores_prefetch(
            query,
            weights,
            pages,
            fmt,
            batch.block_tables,
            batch.request_rows,
            batch.context_lens,
            batch.max_context_len,
            prefetch,
            self._cache.fork_ahead,
        )

    def _begin_fused(self, batch: ForwardBatch) -> _Pass:
        """Room for what the layers of a pass find; it is learnt from at the end of the step."""
        layers, rows = len(self._index_layers), batch.num_tokens
        device = self.predictions.thresholds.device
        here = _Pass(
            found=Candidates.room(layers * rows, self._most, device),
            kth_scores=torch.empty((layers, rows), dtype=torch.float32, device=device),
        )
        self._pass = here
        self._cache.side.later(lambda: self._learn_all(here, batch))
        return here

    def _learn_all(self, here: _Pass, batch: ForwardBatch) -> None:
        """What `learn` does for one layer, for all of them."""
        state, slots = self.predictions, batch.request_slots
        assert slots is not None
        entries = torch.where(slots >= 0, slots + self._first_entries, -1)  # [L, T]
        self._kernels.update_thresholds(
            entries.flatten(),
            here.kth_scores.flatten(),
            here.found.scores,
            here.found.counts,
            state.thresholds.view(-1),
            state.useful.view(-1),
            state.vain.view(-1),
            state.limits.view(-1),
        )
        self._cache.count_useful(self._decoder_layers, here.found.host_slots.view(len(entries), -1))

    def topk_rows(
        self, index_layer: int, scores: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The top-k of the layer that `score` or `start` was called for.

        Args:
            index_layer: place among the layers that have an indexer.
            scores: [T, W] float32 of all rows of the pass.
            batch: the pass.

        Returns:
            what `Kernels.topk_rows` does.
        """
        rows = (scores, batch.context_lens, self._topk, batch.request_rows, batch.block_tables)
        if self._pass is None or self._fused is None:
            return self._kernels.topk_rows(*rows)
        return self._fused.topk_rows(*rows, self._pass.kth_scores[index_layer])

    def start(self, index_layer: int, scores: Tensor, batch: ForwardBatch) -> None:
        """Begin to fetch what the predictions name, on the side stream, op by op.

        Args:
            index_layer: place among the layers that have an indexer.
            scores: [T, W] float32 of all rows of the pass.
            batch: the pass.
        """
        with self._cache.side.fork(scores):
            self._found = self._fetch(index_layer, scores, batch)

    def _fetch(self, index_layer: int, scores: Tensor, batch: ForwardBatch) -> Candidates:
        layer, real = self._index_layers[index_layer], batch.num_real_tokens
        assert batch.request_slots is not None
        found = self._kernels.prefetch_candidates(
            scores[:real],
            batch.context_lens[:real],
            batch.block_tables,
            batch.request_rows[:real],
            batch.request_slots[:real],
            self.predictions.thresholds[index_layer],
            self.predictions.limits[index_layer],
            self._cache.state.host_to_device[layer],
            most=self._most,
            rows_per_unit=self._budget.rows_per_unit,
            least=self._budget.least,
        )
        host_slots, found_scores, counts = found
        self._cache.prefetch(layer, HostSlots(host_slots))
        return Candidates(host_slots=host_slots, scores=found_scores, counts=counts)

    def learn(self, index_layer: int, kth_scores: Tensor, batch: ForwardBatch) -> None:
        """Compare the predictions of the layer that was started with the truth.

        Args:
            index_layer: place among the layers that have an indexer.
            kth_scores: [T] float32 of all rows of the pass.
            batch: the pass.
        """
        found, self._found = self._found, None
        if found is None:  # `score` puts it off to the end of the step
            return
        real, slots = batch.num_real_tokens, batch.request_slots
        assert slots is not None
        predictions = self.predictions
        self._cache.side.later(
            lambda: self._kernels.update_thresholds(
                slots[:real],
                kth_scores[:real],
                found.scores,
                found.counts,
                predictions.thresholds[index_layer],
                predictions.useful[index_layer],
                predictions.vain[index_layer],
                predictions.limits[index_layer],
            )
        )
