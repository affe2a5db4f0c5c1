"""Intra-query prefetch (ECHO paper, section 5.1): rows move while the top-k is being found.

Once a decode step's scores are there, rows that beat the predicted k-th score and aren't resident
are fetched on a side stream. The exact top-k then decides what is attended, and `make_resident`
fetches what is still missing: a wrong prediction costs time, never a token.

Inter-query prefetch, in prefill: once a block of queries has its exact top-k, its rows are recalled
on the side stream while the next block is scored. docs/prefetch.md has both protocols.
"""

from dataclasses import dataclass

from torch import Tensor

from echokv.cache.batch import ForwardBatch, fits_at_once
from echokv.cache.manager import CacheManager
from echokv.indexer.threshold import Predictions
from echokv.kernels.prefetch_args import row_budget
from echokv.kernels.registry import Kernels
from echokv.memory.formats import RowFormat
from echokv.memory.slots import HostSlots

ROW_BYTES_PER_TOKEN = 1.64
"""Bytes that PCIe moves while the indexer reads one token's key: 0.0025 rows of 656 B, 0.0014 of
1152 B, at 52 GB/s against 132 B at 4.2 TB/s."""

QUERY_BLOCK = 256
"""Queries that are scored together in a prefill pass, so that their rows move beside the next."""

LEAST_ROWS = 16
"""Budget of a request whose context is short."""


@dataclass(frozen=True, kw_only=True)
class PrefetchBudget:
    """Most rows that a request may prefetch in one layer and step."""

    rows_per_unit: int  # for each BUDGET_UNIT tokens of context
    least: int  # whatever the context

    @classmethod
    def of(cls, fmt: RowFormat) -> "PrefetchBudget":
        """As many as PCIe moves while the indexer scores the context."""
        return cls(
            rows_per_unit=round(ROW_BYTES_PER_TOKEN * 65536 / fmt.row_bytes), least=LEAST_ROWS
        )


@dataclass(frozen=True)
class _Started:
    """Candidates of one layer, until the true k-th scores are known."""

    index_layer: int
    request_slots: Tensor  # [T]
    scores: Tensor  # [T, most]
    counts: Tensor  # [T]


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
        self._started: _Started | None = None

    def rows_per_request(self, batch: ForwardBatch) -> int:
        """Columns of candidates in this pass, from what is known before it runs; 0: no prefetch.

        All rows that may be prefetched, selected or written in one pass fit the device pool
        together, so that no prediction can take the room that the selection needs.
        """
        if batch.request_slots is None:
            return 0
        tokens, capacity = batch.num_real_tokens, self._cache.capacity
        # Whatever is fetched belongs to the contexts: where all of those fit, everything does.
        taken = 0 if batch.num_context_rows <= capacity else tokens * (self._topk + 1)
        most = min((capacity - taken) // tokens, batch.max_context_len)
        budget = self._budget
        return max(0, row_budget(batch.max_context_len, most, budget.rows_per_unit, budget.least))

    def recalls_blocks(self, batch: ForwardBatch) -> bool:
        """Whether a prefill pass is selected in blocks, each recalled beside the next.

        Where the pass doesn't fit the pool at once, `SparseAttention` recalls ahead instead.
        """
        tokens, rows = batch.num_real_tokens, batch.num_context_rows
        fits = fits_at_once(tokens, self._topk, rows, self._cache.capacity)
        return batch.request_slots is None and fits and tokens > QUERY_BLOCK

    def recall_block(
        self, index_layer: int, host_slots: HostSlots, scores: Tensor, batch: ForwardBatch
    ) -> None:
        """Fetch what a block of queries has selected, on the side stream.

        Args:
            index_layer: place among the layers that have an indexer.
            host_slots: [t, k] int32, the block's exact selection.
            scores: [t, k] float32, its scores.
            batch: the pass, one for which `recalls_blocks` holds.
        """
        self._cache.recall_ahead(
            self._index_layers[index_layer],
            host_slots,
            scores,
            max_distinct=batch.num_context_rows,
        )

    def start(self, index_layer: int, scores: Tensor, batch: ForwardBatch) -> None:
        """Begin to fetch what the predictions name, on the side stream.

        Args:
            index_layer: place among the layers that have an indexer.
            scores: [T, W] float32 of all rows of the pass.
            batch: a pass for which `rows_per_request` isn't 0.
        """
        assert batch.request_slots is not None
        layer, real = self._index_layers[index_layer], batch.num_real_tokens
        request_slots = batch.request_slots[:real]
        with self._cache.side.fork(scores):
            host_slots, found, counts = self._kernels.prefetch_candidates(
                scores[:real],
                batch.context_lens[:real],
                batch.block_tables,
                batch.request_rows[:real],
                request_slots,
                self.predictions.thresholds[index_layer],
                self.predictions.enabled[index_layer],
                self._cache.state.host_to_device[layer],
                most=self.rows_per_request(batch),
                rows_per_unit=self._budget.rows_per_unit,
                least=self._budget.least,
            )
            self._cache.prefetch(layer, HostSlots(host_slots))
        self._started = _Started(index_layer, request_slots, found, counts)

    def learn(self, kth_scores: Tensor) -> None:
        """Compare the predictions of the layer that was started with the truth; does nothing else.

        Args:
            kth_scores: [T] float32 of all rows of the pass.
        """
        started, self._started = self._started, None
        if started is None:
            return
        layer = started.index_layer
        with self._cache.side.fork(kth_scores):
            self._kernels.update_thresholds(
                started.request_slots,
                kth_scores[: started.request_slots.shape[0]],
                started.scores,
                started.counts,
                self.predictions.thresholds[layer],
                self.predictions.usefulness[layer],
                self.predictions.enabled[layer],
            )
