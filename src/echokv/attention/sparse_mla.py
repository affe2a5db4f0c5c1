"""Sparse MLA over cached rows: makes what was selected resident, then attends.

Knows the cache and the attention kernel. When a pass selects more rows than the device pool can
surely hold, it attends in pieces of fewer tokens; the cut follows from shapes alone, so that
nothing waits for the device, and any pool of at least k slots works.
"""

import torch
from torch import Tensor

from echokv.cache.batch import ForwardBatch
from echokv.cache.protocol import KVCache
from echokv.errors import CapacityError
from echokv.indexer.indexer import Selection
from echokv.kernels.registry import Kernels
from echokv.memory.formats import RowFormat
from echokv.memory.slots import DeviceSlots, HostSlots

RECALL_BESIDE = True
"""Whether a decode step's rows are recalled on a stream of their own, beside the products that its
query still needs; False recalls them where attention asks."""


def fits_at_once(num_tokens: int, topk: int, context_rows: int, capacity: int) -> bool:
    """Whether all that a pass may select surely fits the device pool beside its new rows.

    Args:
        num_tokens: real rows of the pass.
        topk: entries of a selection.
        context_rows: most distinct rows that the pass can select or write.
        capacity: device slots a layer.
    """
    return min(num_tokens * (topk + 1), context_rows) <= capacity


def plan_pieces(num_tokens: int, topk: int, capacity: int) -> list[slice]:
    """Cut a pass into pieces whose selections, taken alone, surely fit the device pool.

    Args:
        num_tokens: real rows of the pass.
        topk: entries of a selection; at most capacity.
        capacity: device slots a layer.
    """
    step = capacity // topk
    return [slice(at, min(at + step, num_tokens)) for at in range(0, num_tokens, step)]


class SparseAttention:
    """Reads and writes the MLA rows of every layer.

    A pass that fits (`fits_at_once`) is one cache step: new and selected rows stay resident until
    the next pass. Otherwise it attends in pieces (`plan_pieces`), each a cache step of its own;
    new rows are then kept as far as the pool goes and recalled from host where they had to leave.

    On a GPU the rows of a decode step can be recalled beside what its query still needs
    (`begin_recall`): copying over PCIe and reading weights don't slow each other.

    Padding rows neither write nor read. `batch.num_real_tokens` decides the pieces: a captured
    graph must be captured with all rows real.

    Args:
        kernels: the backend.
        cache: where rows live.
        fmt: how a row is laid out.
        scale: softmax scale, YaRN's mscale squared included.
        topk: entries of a selection.

    Raises:
        CapacityError: a device pool of fewer than topk slots, too small for a single token.
    """

    def __init__(
        self, kernels: Kernels, cache: KVCache, fmt: RowFormat, scale: float, topk: int
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
        device = cache.rows(0).device
        beside = RECALL_BESIDE and device.type == "cuda" and cache.recalls
        # A high priority: its blocks are few, and a product's would keep them waiting.
        self._stream = torch.cuda.Stream(device, priority=-1) if beside else None
        self._recalled: DeviceSlots | None = None

    def begin_pass(self) -> None:
        """Start a forward pass: what earlier ones protected may be evicted from now on."""
        self._cache.begin_step()

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
        )

    def recalls_beside(self, batch: ForwardBatch) -> bool:
        """Whether `begin_recall` would run beside the caller's next products."""
        return (
            self._stream is not None
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
        if self._stream is None or not self.recalls_beside(batch):
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._recalled = self._make_resident(
                layer, selection, batch, slice(0, batch.num_tokens)
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
        capacity = self._cache.capacity
        at_once = self._fits(batch, topk)
        if at_once and real == batch.num_tokens:
            return self._attend_rows(layer, query, selection, batch, slice(0, real))
        output = query.new_zeros(*query.shape[:2], self._fmt.latent_dim)
        for rows in [slice(0, real)] if at_once else plan_pieces(real, topk, capacity):
            if not at_once:
                self._cache.begin_step(layer)
            output[rows] = self._attend_rows(layer, query, selection, batch, rows)
        return output

    def _attend_rows(
        self, layer: int, query: Tensor, selection: Selection, batch: ForwardBatch, rows: slice
    ) -> Tensor:
        device_slots, self._recalled = self._recalled, None
        if device_slots is None:
            device_slots = self._make_resident(layer, selection, batch, rows)
        else:
            assert self._stream is not None, "it was recalled there"
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        # Pieces depend on the device pool, and in a prefill so would a library's bits.
        attend = self._kernels.decode_mla if batch.is_decode else None
        attend = attend or self._kernels.sparse_mla
        return attend(query[rows], self._cache.rows(layer), device_slots, self._fmt, self._scale)

    def _make_resident(
        self, layer: int, selection: Selection, batch: ForwardBatch, rows: slice
    ) -> DeviceSlots:
        return self._cache.make_resident(
            layer,
            HostSlots(selection.host_slots[rows]),
            selection.scores[rows],
            max_distinct=batch.num_context_rows,
        )

    def _fits(self, batch: ForwardBatch, topk: int) -> bool:
        capacity = self._cache.capacity
        return fits_at_once(batch.num_real_tokens, topk, batch.num_context_rows, capacity)
