"""Inter-query prefetch (ECHO paper, section 5.2): rows move while a prefill pass is still scored.

Knows when a pass may prefetch, the shifts, and what is counted. Whatever lies above a row's bound
is selected, whatever the shift: a wrong one moves less, and never a row in vain
(`kernels/cuda/prefill_prefetch.cuh`).
"""

import torch
from torch import Tensor

from echokv.cache.batch import Chunks, ForwardBatch, fits_at_once
from echokv.cache.manager import CacheManager
from echokv.indexer.threshold import Predictions
from echokv.kernels.prefetch_args import EMA_ALPHA
from echokv.kernels.protocol import FusedPrefetch
from echokv.memory.formats import IndexKeyFormat


class PrefillPrefetcher:
    """Scores the layers of a prefill pass while rows move, and learns shifts from its k-th scores.

    Args:
        fused: the backend's op; None: nothing is prefetched.
        cache: what rows are fetched into.
        predictions: of the layers that have an indexer.
        index_layers: decoder layer of each index layer.
        topk: entries of a selection.
    """

    def __init__(
        self,
        fused: FusedPrefetch | None,
        cache: CacheManager,
        predictions: Predictions,
        index_layers: tuple[int, ...],
        topk: int,
    ) -> None:
        self._fused = fused
        self._cache = cache
        self._predictions = predictions
        self._index_layers = index_layers
        self._topk = topk
        self._most = 0  # rows that a layer of this pass may fetch; 0: none
        self._shifts: Tensor | None = None  # [L, R] of this pass
        self._kth_scores: list[Tensor] = []  # [R] a layer
        device = predictions.shifts.device
        self._decoder_layers = torch.tensor(index_layers, dtype=torch.int32, device=device)

    def rows_ahead(self, batch: ForwardBatch) -> int:
        """Most rows that a layer of this pass may fetch, from what is known before it runs.

        Together with the rows that it selects and writes they fit the device pool, so that no
        prediction can take the room that the selection needs. A pass that doesn't fit the pool
        fetches none: it reads copies of its rows.
        """
        tokens, rows, capacity = (
            batch.num_real_tokens, batch.num_context_rows, self._cache.capacity,
        )  # fmt: skip
        if (
            self._fused is None
            or batch.chunks is None
            or not fits_at_once(tokens, self._topk, rows, capacity)
        ):
            return 0
        # Whatever is fetched belongs to the contexts: where all of those fit, everything does.
        taken = 0 if rows <= capacity else tokens * (self._topk + 1)
        return min(rows, capacity - taken)

    def begin_pass(self, batch: ForwardBatch) -> None:
        """Decide whether a pass prefetches; before its first layer.

        Args:
            batch: any pass.
        """
        self._most = self.rows_ahead(batch)
        if self._most > 0:
            assert batch.chunks is not None
            chunks, kth_scores = batch.chunks, list[Tensor]()
            self._shifts, self._kth_scores = (
                self._predictions.shifts[:, chunks.request_slots],
                kth_scores,
            )
            self._cache.side.later(lambda: self._learn_all(chunks, kth_scores))

    def score(
        self,
        index_layer: int,
        query: Tensor,
        weights: Tensor,
        pages: Tensor,
        fmt: IndexKeyFormat,
        batch: ForwardBatch,
        rows: slice,
    ) -> Tensor | None:
        """Scores of some rows of a pass while others that they name move.

        Args:
            index_layer: place among the layers that have an indexer.
            query: [t, H, D] of these rows; the rest as `Kernels.index_scores` takes it.
            weights: [t, H] float32.
            pages: [n_pages, page_bytes] uint8 of the layer.
            fmt: of the pages.
            batch: the pass.
            rows: of the pass.

        Returns:
            [t, W] float32; None where this pass doesn't prefetch.
        """
        if self._most == 0:
            return None
        fused, layer = self._fused, self._index_layers[index_layer]
        target = self._cache.fused_layer(layer)
        if target is None or fused is None or not fused.fetches(query, pages, fmt, target):
            return None
        most = self._most
        if batch.num_context_rows > self._cache.capacity:  # then all pieces share it
            most = most * query.shape[0] // batch.num_tokens
        if most == 0:
            return None
        assert self._shifts is not None
        self._cache.wait()  # for the new rows, which take names off the same list
        scores, found = fused.prefill_scores_prefetch(
            query,
            weights,
            pages,
            fmt,
            batch.block_tables,
            batch.request_rows[rows],
            batch.context_lens[rows],
            batch.max_context_len,
            self._shifts[index_layer],
            target,
            k=self._topk,
            most=most,
        )
        layers, host_slots = self._decoder_layers[index_layer : index_layer + 1], found.host_slots
        self._cache.side.later(lambda: self._cache.count_useful(layers, host_slots[None]))
        return scores

    def learn(self, kth_scores: Tensor, batch: ForwardBatch) -> None:
        """Note what a layer's top-k says, layer after layer.

        Args:
            kth_scores: [T] float32 of all rows of the pass.
            batch: the pass.
        """
        if self._most > 0 and batch.chunks is not None:
            self._kth_scores.append(kth_scores[batch.chunks.last_rows])

    def _learn_all(self, chunks: Chunks, kth_scores: list[Tensor]) -> None:
        """Move all shifts towards what was found; where that is infinite, there is none."""
        shifts, found = self._predictions.shifts, torch.stack(kth_scores)  # [L, R]
        old = shifts[:, chunks.request_slots]
        new = torch.where(old.isfinite(), EMA_ALPHA * old + (1 - EMA_ALPHA) * found, found)
        new = torch.where(found.isfinite(), new, torch.nan)
        shifts[:, chunks.request_slots] = new
        shifts[:, -1] = torch.where(new[:, -1].isnan(), shifts[:, -1], new[:, -1])
