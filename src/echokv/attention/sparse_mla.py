"""Sparse MLA over cached rows: makes what was selected resident, then attends.

Knows the cache and the attention kernel. When a pass may select more rows than the device pool
holds, it attends over copies of them, and any pool of at least k slots works. A decode step always
fits, so that nothing in it waits for the device.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from echokv.attention.pieces import plan_pieces
from echokv.cache.batch import ForwardBatch, fits_at_once
from echokv.cache.protocol import KVCache
from echokv.errors import CapacityError
from echokv.indexer.indexer import Selection
from echokv.kernels.protocol import Kernels
from echokv.memory.formats import RowFormat
from echokv.memory.slots import DeviceSlots, HostSlots

RECALL_BESIDE = True
"""Whether a decode step's rows are recalled beside the products that its query still needs; False
recalls them where attention asks."""


MAX_STAGED_BYTES = 128 * 2**20
"""Most bytes of copied rows alive at once. They come when the scores of the layer are gone, and so
need no more HBM than is kept for those (`memory.sizes.MAX_SCORE_BYTES`)."""


class SparseAttention:
    """Reads and writes the MLA rows of every layer.

    A pass that fits (`fits_at_once`) makes its selection resident: new and selected rows stay so
    until the next pass. Otherwise only what each request's last token selects becomes resident, for
    the next step will want much of it, and new rows as far as the pool goes; all tokens then attend
    over copies out of both pools (`stage`), in pieces of fewer tokens (`plan_pieces`) where the
    copies would exceed MAX_STAGED_BYTES.

    The rows of a decode step can be recalled beside what its query still needs
    (`begin_recall`): copying over PCIe and reading weights don't slow each other.

    Padding rows neither write nor read. `batch.num_real_tokens` decides the pieces: a captured
    graph must be captured with all rows real.

    Args:
        kernels: the backend.
        cache: where rows live.
        fmt: how a row is laid out.
        scale: softmax scale, YaRN's mscale squared included.
        topk: entries of a selection.
        rows_ahead: where rows are prefetched, how many a layer of a pass may bring; None: nothing
            is.

    Raises:
        CapacityError: a device pool of fewer than topk slots, too small for a single token.
    """

    def __init__(
        self,
        kernels: Kernels,
        cache: KVCache,
        fmt: RowFormat,
        scale: float,
        topk: int,
        *,
        rows_ahead: Callable[[ForwardBatch], int] | None = None,
    ) -> None:
        if cache.capacity < topk:
            raise CapacityError(
                f"--device-pool-tokens {cache.capacity} is below index_topk {topk}:"
                " attention of one token reads that many rows at once"
            )
        self._kernels = kernels
        self._cache = cache
        self._fmt = fmt
        self._scale = scale
        self._topk = topk
        self._rows_ahead = rows_ahead
        self._recalled: DeviceSlots | None = None

    def begin_pass(self, batch: ForwardBatch) -> None:
        """Start a forward pass: what earlier ones protected may be evicted from now on."""
        real = batch.num_real_tokens
        selecting = real if self._fits(batch) else len(self._last_rows(batch))
        most = min(real + selecting * self._topk, batch.num_context_rows)
        ahead = 0 if self._rows_ahead is None else self._rows_ahead(batch)
        self._cache.begin_step(most_rows=most + ahead, prefetches=ahead > 0)

    def end_pass(self) -> None:
        """End it: what layers left running on other streams must be done before the next."""
        self._cache.end_step()

    def append(self, layer: int, latent: Tensor, rope: Tensor, batch: ForwardBatch) -> None:
        """Store this pass's rows of one layer.

        Args:
            layer: decoder layer.
            latent: [T, latent_dim], normed.
            rope: [T, rope_dim], rotated, in the interleaved order of the projection.
            batch: the pass; `host_slots` says where each row goes.
        """
        real, keep = batch.num_real_tokens, self._cache.capacity
        if not self._fits(batch):
            keep -= len(self._last_rows(batch)) * self._topk
        rows = self._kernels.encode_rows(latent, rope, self._fmt)
        self._cache.append(
            layer,
            HostSlots(batch.host_slots[:real]),
            rows[:real],
            keep=min(real, keep),
            beside=True,
            # A prefetch that takes rows in needs to know which are there.
            until_selected=self._rows_ahead is None,
        )

    def recalls_beside(self, batch: ForwardBatch) -> bool:
        """Whether `begin_recall` would run beside the caller's next products."""
        return (
            RECALL_BESIDE
            and self._cache.recalls
            and batch.is_decode
            and batch.num_real_tokens == batch.num_tokens
            and self._fits(batch)
        )

    def begin_recall(self, layer: int, selection: Selection, batch: ForwardBatch) -> None:
        """Begin to make a selection resident; `attend` of the same layer and selection waits.

        Does nothing where `recalls_beside` is false. Nothing but products may run before `attend`.

        Args:
            layer: decoder layer; this pass's rows must have been appended.
            selection: kept by the caller until `attend` has returned.
            batch: the pass.
        """
        if self.recalls_beside(batch):
            whole = slice(0, batch.num_tokens)
            self._recalled = self._cache.recall_ahead(
                layer, *_of_rows(selection, whole), max_distinct=batch.num_context_rows
            )

    def attend(
        self, layer: int, query: Tensor, selection: Selection, batch: ForwardBatch
    ) -> Tensor:
        """Attention of every token over its selected rows.

        Args:
            layer: decoder layer; this pass's rows must have been appended.
            query: [T, H, latent_dim + rope_dim], absorbed and rotated.
            selection: of this layer, or of the layer whose selection it shares.
            batch: the pass.

        Returns:
            [T, H, latent_dim] in the dtype of query; zeros for padding.
        """
        if not self._fits(batch):
            return self._attend_staged(layer, query, selection, batch)
        rows = slice(0, batch.num_real_tokens)
        device_slots, self._recalled = self._recalled, None
        if device_slots is None:
            device_slots = self._cache.make_resident(
                layer, *_of_rows(selection, rows), max_distinct=batch.num_context_rows
            )
        else:
            self._cache.wait()
        self._cache.settle(layer)
        attended = self._over(self._cache.rows(layer), device_slots, query, batch, rows)
        return _padded(attended, batch.num_tokens)

    def _attend_staged(
        self, layer: int, query: Tensor, selection: Selection, batch: ForwardBatch
    ) -> Tensor:
        """`attend` of a pass that doesn't fit the device pool."""
        last = self._last_rows(batch)
        if len(last) > 0:
            chosen = HostSlots(selection.host_slots[last])
            self._cache.make_resident(layer, chosen, selection.scores[last])
        real, chosen = batch.num_real_tokens, selection.host_slots
        most = max(self._topk, MAX_STAGED_BYTES // self._fmt.row_bytes)
        parts = []
        pieces = plan_pieces(chosen[:real], most, batch.num_context_rows, self._cache.host_slots)
        for piece in pieces:
            copies, places = self._cache.stage(
                layer, HostSlots(chosen[piece.rows]), most_rows=piece.distinct
            )
            parts.append(self._over(copies, places, query, batch, piece.rows))
        return _padded(parts[0] if len(parts) == 1 else torch.cat(parts), batch.num_tokens)

    def _over(
        self, rows: Tensor, slots: DeviceSlots, query: Tensor, batch: ForwardBatch, tokens: slice
    ) -> Tensor:
        """Attention of some tokens of a pass over rows that `slots` name."""
        args = (query[tokens], rows, slots, self._fmt, self._scale)
        library = self._kernels.library_mla
        if library is None:
            return self._kernels.sparse_mla(*args)
        if batch.is_decode:
            return library.decode(*args)
        return library.prefill(*args, first_row=tokens.start)

    def _last_rows(self, batch: ForwardBatch) -> Tensor:
        """[R] int64: the last row of each request, of as many as the pool has room for."""
        if batch.chunks is None:
            return batch.sampled_rows[:0]
        return batch.chunks.last_rows[: self._cache.capacity // self._topk]

    def _fits(self, batch: ForwardBatch) -> bool:
        tokens, rows = batch.num_real_tokens, batch.num_context_rows
        return fits_at_once(tokens, self._topk, rows, self._cache.capacity)


def _of_rows(selection: Selection, rows: slice) -> tuple[HostSlots, Tensor]:
    return HostSlots(selection.host_slots[rows]), selection.scores[rows]


def _padded(attended: Tensor, tokens: int) -> Tensor:
    """[t, H, latent_dim] -> [tokens, H, latent_dim], zeros after the first."""
    missing = tokens - attended.shape[0]
    return functional.pad(attended, (0, 0, 0, 0, 0, missing)) if missing else attended
