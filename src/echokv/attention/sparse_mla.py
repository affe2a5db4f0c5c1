"""Sparse MLA over cached rows: makes what was selected resident, then attends.

Knows the cache and the attention kernel. When a pass may select more rows than the device pool
holds, it attends in pieces of fewer tokens (`attention/pieces.py`), and any pool of at least k
slots works. A decode step always fits, so that nothing in it waits for the device.
"""

from collections.abc import Callable

from torch import Tensor

from echokv.attention.pieces import Piece, plan_pieces
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


class SparseAttention:
    """Reads and writes the MLA rows of every layer.

    A pass that fits (`fits_at_once`) is one cache step: new and selected rows stay resident until
    the next pass. Otherwise it attends in pieces (`plan_pieces`), each a cache step of its own;
    new rows are then kept as far as the pool goes and recalled from host where they had to leave.

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
        rows_ahead: where rows are prefetched, how many a token of a pass may bring; None: nothing
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
        most = min(batch.num_real_tokens * (self._topk + 1), batch.num_context_rows)
        if self._rows_ahead is not None:
            most += batch.num_real_tokens * self._rows_ahead(batch)
        self._cache.begin_step(most_rows=most)

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
        real = batch.num_real_tokens
        rows = self._kernels.encode_rows(latent, rope, self._fmt)
        self._cache.append(
            layer,
            HostSlots(batch.host_slots[:real]),
            rows[:real],
            keep=min(real, self._cache.capacity),
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
            and self._fits(batch, self._topk)
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
        real, topk = batch.num_real_tokens, selection.host_slots.shape[1]
        whole = Piece(slice(0, real), batch.num_context_rows)
        if self._fits(batch, topk):
            if real == batch.num_tokens:
                return self._attend_piece(layer, query, selection, batch, whole)
            pieces = [whole]
        else:
            pieces = plan_pieces(selection.host_slots[:real], self._cache.capacity)
        output = query.new_zeros(*query.shape[:2], self._fmt.latent_dim)
        for piece in pieces:
            if piece is not whole:
                self._cache.begin_step(layer, most_rows=piece.distinct)
            output[piece.rows] = self._attend_piece(layer, query, selection, batch, piece)
        return output

    def _attend_piece(
        self,
        layer: int,
        query: Tensor,
        selection: Selection,
        batch: ForwardBatch,
        piece: Piece,
    ) -> Tensor:
        rows = piece.rows
        device_slots, self._recalled = self._recalled, None
        if device_slots is None:
            device_slots = self._cache.make_resident(
                layer, *_of_rows(selection, rows), max_distinct=piece.distinct
            )
        else:
            self._cache.wait()
        args = (query[rows], self._cache.rows(layer), device_slots, self._fmt, self._scale)
        library = self._kernels.library_mla
        if library is None:
            return self._kernels.sparse_mla(*args)
        if batch.is_decode:
            return library.decode(*args)
        return library.prefill(*args, first_row=rows.start)

    def _fits(self, batch: ForwardBatch, topk: int) -> bool:
        capacity = self._cache.capacity
        return fits_at_once(batch.num_real_tokens, topk, batch.num_context_rows, capacity)


def _of_rows(selection: Selection, rows: slice) -> tuple[HostSlots, Tensor]:
    return HostSlots(selection.host_slots[rows]), selection.scores[rows]
