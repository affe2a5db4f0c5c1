"""The lightning indexer's memory: one key a token, scored against every query; gives the top-k.

Knows the index-key pages and nothing of the model around it: queries, keys and head weights come
ready (`models.index_projections`). Selections speak host slots; where a row sits is the cache's
matter.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from echokv.cache.batch import ForwardBatch
from echokv.indexer.prefetch import Prefetcher
from echokv.kernels.protocol import Kernels
from echokv.kernels.reference.index_scores import score_width
from echokv.memory.formats import IndexKeyFormat
from echokv.memory.sizes import MAX_SCORE_BYTES
from echokv.memory.slots import HostSlots


@dataclass(frozen=True)
class Selection:
    """The rows that one layer's attention reads, for each token of a pass.

    Entries are in ascending position and the valid ones come first: the order in which attention
    sums, so that it depends neither on slots nor on scores.
    """

    positions: Tensor  # [T, k] int32, -1 padded
    host_slots: HostSlots  # [T, k] int32, -1 padded
    scores: Tensor  # [T, k] float32, -inf where positions is -1
    kth_scores: Tensor  # [T] float32: lowest selected score; -inf below k valid tokens


def rows_per_score_piece(max_context_len: int) -> int:
    """Rows scored at once so that the scores take at most MAX_SCORE_BYTES (or one row).

    A longer prefill chunk is scored in several pieces.
    """
    return max(1, MAX_SCORE_BYTES // (4 * score_width(max_context_len)))


class TokenSelector(Protocol):
    """What a model asks of its indexer; `Indexer` is the product's one implementation."""

    topk: int  # entries of a selection

    def begin_pass(self, batch: ForwardBatch) -> None:
        """See `Indexer`."""
        ...

    def append(self, index_layer: int, keys: Tensor, batch: ForwardBatch) -> None:
        """See `Indexer`."""
        ...

    def select(
        self, index_layer: int, query: Tensor, weights: Tensor, batch: ForwardBatch
    ) -> Selection:
        """See `Indexer`."""
        ...


class Indexer:
    """Index keys of every layer that has an indexer, and exact top-k over them.

    Args:
        kernels: the backend.
        pages: [L_index, n_pages, page_bytes] uint8; page id == host block id.
        fmt: how a page is laid out.
        topk: entries of a selection (`index_topk`).
        prefetcher: what is told of scores and k-th scores; None: no prefetch.
    """

    def __init__(
        self,
        kernels: Kernels,
        pages: Tensor,
        fmt: IndexKeyFormat,
        topk: int,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        self._kernels = kernels
        self._pages = pages
        self._fmt = fmt
        self._prefetcher = prefetcher
        self._schedules: list[Any] = []
        self.topk = topk

    @property
    def pages(self) -> Tensor:
        """[L_index, n_pages, page_bytes] uint8: the keys; for tools that fill or inspect them."""
        return self._pages

    def with_topk(self, topk: int) -> "Indexer":
        """An indexer over the same keys that selects another number of tokens."""
        return Indexer(self._kernels, self._pages, self._fmt, topk)

    def begin_pass(self, batch: ForwardBatch) -> None:
        """Prepare what the scores of all layers share; called before the first layer of a pass."""
        if self._prefetcher is not None:
            self._prefetcher.begin_pass(batch)
        scores = self._kernels.scheduled_scores
        if scores is not None:
            self._schedules = [
                scores.schedule(
                    batch.block_tables,
                    batch.request_rows[rows],
                    batch.context_lens[rows],
                    batch.max_context_len,
                )
                for rows in self._pieces(batch)
            ]

    def append(self, index_layer: int, keys: Tensor, batch: ForwardBatch) -> None:
        """Store the keys of this pass's tokens; padding is skipped.

        Args:
            index_layer: place among the layers that have an indexer.
            keys: [T, D] float, normed and rotated.
            batch: the pass; `host_slots` says where each key goes.
        """
        self._kernels.write_index_keys(keys, batch.host_slots, self._pages[index_layer], self._fmt)

    def select(
        self, index_layer: int, query: Tensor, weights: Tensor, batch: ForwardBatch
    ) -> Selection:
        """The exact top-k of every row, ties to the lower position.

        Args:
            index_layer: place among the layers that have an indexer.
            query: [T, H, D] float, rotated.
            weights: [T, H] float32, times H^-0.5 already.
            batch: the pass; its keys must have been appended.
        """
        pieces = [
            self._select_rows(index_layer, query, weights, batch, number, rows)
            for number, rows in enumerate(self._pieces(batch))
        ]
        selection = pieces[0] if len(pieces) == 1 else _joined(pieces)
        if self._prefetcher is not None:
            self._prefetcher.prefill.learn(selection.kth_scores, batch)
        return selection

    def _pieces(self, batch: ForwardBatch) -> list[slice]:
        """The rows of a pass, cut so that the scores of each piece fit their bound."""
        step = rows_per_score_piece(batch.max_context_len)
        return [slice(start, start + step) for start in range(0, batch.num_tokens, step)]

    def _select_rows(
        self,
        index_layer: int,
        query: Tensor,
        weights: Tensor,
        batch: ForwardBatch,
        piece: int,
        rows: slice,
    ) -> Selection:
        request_rows, context_lens = batch.request_rows[rows], batch.context_lens[rows]
        keys = (self._pages[index_layer], self._fmt)
        prefetcher = self._prefetcher
        whole = request_rows.shape[0] == batch.num_tokens
        if prefetcher is not None and prefetcher.is_on and whole:
            scores = prefetcher.score(index_layer, query, weights, *keys, batch)
            if scores is None:
                scores = self._scores(index_layer, query, weights, batch, piece, rows)
                prefetcher.start(index_layer, scores, batch)
            positions, kth_scores, slots, selected = prefetcher.topk_rows(
                index_layer, scores, batch
            )
            prefetcher.learn(index_layer, kth_scores, batch)
        else:
            scores = self._scores(index_layer, query[rows], weights[rows], batch, piece, rows)
            positions, kth_scores, slots, selected = self._kernels.topk_rows(
                scores, context_lens, self.topk, request_rows, batch.block_tables
            )
        return Selection(
            positions=positions,
            host_slots=HostSlots(slots),
            scores=selected,
            kth_scores=kth_scores,
        )

    def _scores(
        self,
        index_layer: int,
        query: Tensor,
        weights: Tensor,
        batch: ForwardBatch,
        piece: int,
        rows: slice,
    ) -> Tensor:
        """[t, W] float32 of some rows of a pass."""
        scored = (query, weights, self._pages[index_layer], self._fmt)
        if self._prefetcher is not None:
            made = self._prefetcher.prefill.score(index_layer, *scored, batch, rows)
            if made is not None:
                return made
        scheduled = self._kernels.scheduled_scores
        if scheduled is not None:
            return scheduled.index_scores(*scored, self._schedules[piece])
        return self._kernels.index_scores(
            *scored,
            batch.block_tables,
            batch.request_rows[rows],
            batch.context_lens[rows],
            batch.max_context_len,
        )


def _joined(pieces: list[Selection]) -> Selection:
    return Selection(
        positions=torch.cat([piece.positions for piece in pieces]),
        host_slots=HostSlots(torch.cat([piece.host_slots for piece in pieces])),
        scores=torch.cat([piece.scores for piece in pieces]),
        kth_scores=torch.cat([piece.kth_scores for piece in pieces]),
    )
