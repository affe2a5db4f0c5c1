"""Prefill's index scores and, while they are made, rows that queries will probably select.

Inter-query prefetch in one launch (ECHO paper, sections 5.2 and 5.3): see prefill_prefetch.cuh.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from echokv.kernels.checks import check_tensor
from echokv.kernels.cuda.fetch_listed import PrefetchArguments, fetching_bytes
from echokv.kernels.cuda.index_scores import HEAD_DIM, HEADS, quantise_query, takes
from echokv.kernels.cuda.launch import Arguments, pointer
from echokv.kernels.cuda.layer import layer_of, moves_16_bytes
from echokv.kernels.cuda.prefill_scores import MODULE, PrefillArguments
from echokv.kernels.cuda.schedule import Contexts, Rows
from echokv.kernels.fused_layer import FusedLayer
from echokv.kernels.reference.index_scores import check_scores_args, score_width
from echokv.kernels.reference.score_bounds import BINS
from echokv.memory.formats import IndexKeyFormat
from echokv.memory.slots import NO_SLOT

WAVE_ROWS, FETCHING_WARPS = 64, 2
SHARED_BYTES = 220_416
"""Shared in prefill_scores.cu, without the rows that land there."""

_NOTES_BYTES = 8 * WAVE_ROWS
_LATE_WARPS, _LATE_BLOCKS = 16, 32


class InterArguments(Arguments):
    """See prefill_prefetch.cuh."""

    _fields_ = (
        ("fetch", PrefetchArguments),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "shifts", "histograms", "scored", "ready", "bounds", "listed", "block_tables",
                "scores",
            )
        ),
        ("rows", Rows),
        ("blocks", ctypes.c_uint32),
        ("k", ctypes.c_uint32),
    )  # fmt: skip


class PrefetchingArguments(Arguments):
    """See prefill_scores.cu."""

    _fields_ = (("scores", PrefillArguments), ("prefetch", InterArguments))


@dataclass(frozen=True, kw_only=True)
class InterPrefetch:
    """What a pass over one layer has fetched, on the device."""

    host_slots: Tensor  # [most] int32: distinct ones that were fetched; -1 elsewhere
    bounds: Tensor  # [T] float32: see `score_bounds`
    arguments: InterArguments  # for `fetch_late`
    kept: tuple[object, ...]  # what the arguments point to


def prefill_scores_prefetch(
    query: Tensor,
    weights: Tensor,
    pages: Tensor,
    fmt: IndexKeyFormat,
    block_tables: Tensor,
    request_rows: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    shifts: Tensor,
    layer: FusedLayer,
    *,
    k: int,
    most: int,
) -> tuple[Tensor, InterPrefetch]:
    """`index_scores`, and while later rows are scored, what earlier rows want is fetched.

    A row of the cache is wanted by a row of the pass whose bound (`score_bounds`, of these scores)
    the shifted score reaches. What is wanted and absent is fetched, once however many rows of the
    pass want it, at priority `floor`, into the slots that are next on the ready list, as long as
    there are scores to be made; the rest is left to `fetch_late` and the recall. The scores are
    those of `index_scores`, bit for bit.

    Args:
        query: [T, H, 128], and the rest as for `index_scores`, of shapes that `takes` allows.
        weights: [T, H] float32.
        pages: [n_pages, page_bytes] uint8.
        fmt: fp8.
        block_tables: [R, B] int32.
        request_rows: [T] int32.
        context_lens: [T] int32.
        max_context_len: the largest of context_lens.
        shifts: [R] float32, predicted k-th scores.
        layer: in place; totals count prefetched rows as recalled and allocated, and who left. The
            pool must have room for `most` rows beside what else is protected in this step. Rows of
            whole, aligned sixteen-byte words.
        k: entries of a selection.
        most: rows to fetch, at most.

    Returns:
        [T, W] float32 scores, and what was fetched.
    """
    check_scores_args(
        query, weights, pages, fmt, block_tables, request_rows, context_lens, max_context_len
    )
    (rows, heads, _), device = query.shape, query.device
    layer.check()
    check_tensor("shifts", shifts, (block_tables.shape[0],), torch.float32, device=device)
    if not takes(query, pages, fmt) or not moves_16_bytes(layer.host_rows, layer.device_rows):
        raise ValueError(
            f"prefetching is made for fp8 keys of {HEAD_DIM} dimensions under {HEADS} heads and"
            f" rows of whole sixteen-byte words, got {fmt}, {heads} heads and rows of"
            f" {layer.device_rows.shape[1]} B"
        )
    out = torch.empty((rows, score_width(max_context_len)), device=device)
    found = inter_prefetch(
        out, context_lens, request_rows, block_tables, shifts, layer, k=k, most=most
    )
    if rows:
        images = quantise_query(query, weights)
        scores = PrefillArguments(
            pointer(images), pointer(pages), pointer(block_tables), found.arguments.rows,
            pointer(out), block_tables.shape[1],
        )  # fmt: skip
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        MODULE.launch(
            f"prefill_prefetching_{heads}", PrefetchingArguments(scores, found.arguments), device,
            blocks=sms, early=True,
            shared_bytes=SHARED_BYTES + fetching_bytes(FETCHING_WARPS, layer.host_rows.shape[1]),
        )  # fmt: skip
    return out, found


def inter_prefetch(
    scores: Tensor,
    context_lens: Tensor,
    request_rows: Tensor,
    block_tables: Tensor,
    shifts: Tensor,
    layer: FusedLayer,
    *,
    k: int,
    most: int,
) -> InterPrefetch:
    """What a kernel gets that makes scores [T, W]; the rest as for `prefill_scores_prefetch`."""
    if most < 1 or k < 1:
        raise ValueError(f"most and k must be at least 1, got {most} and {k}")
    (rows, width), device = scores.shape, scores.device
    host_slots = torch.full((most,), NO_SLOT, dtype=torch.int32, device=device)
    bounds = torch.empty(rows, device=device)
    waves = -(-rows // WAVE_ROWS)
    counts = torch.zeros(rows * (BINS + 1) + waves + 1, dtype=torch.int32, device=device)
    histograms, scored, ready, listed = counts.split([rows * BINS, rows, waves, 1])
    fetch = PrefetchArguments(layer=layer_of(layer), host_slots=pointer(host_slots), most=most)
    arguments = InterArguments(
        fetch, pointer(shifts), pointer(histograms), pointer(scored), pointer(ready),
        pointer(bounds), pointer(listed), pointer(block_tables), pointer(scores),
        Rows(Contexts(pointer(context_lens), rows, width), pointer(request_rows)),
        block_tables.shape[1], k,
    )  # fmt: skip
    return InterPrefetch(
        host_slots=host_slots,
        bounds=bounds,
        arguments=arguments,
        kept=(counts, scores, shifts, block_tables, context_lens, request_rows, layer),
    )


def fetch_late(prefetch: InterPrefetch) -> None:
    """Fetch what rows of the pass want and is still absent, in place.

    May run beside whatever takes no rows of the layer in, such as the top-k.

    Args:
        prefetch: what `prefill_scores_prefetch` returned.
    """
    if prefetch.bounds.shape[0]:
        landing = fetching_bytes(_LATE_WARPS, prefetch.arguments.fetch.layer.row_bytes)
        MODULE.launch(
            "prefill_fetch_late", prefetch.arguments, prefetch.bounds.device, blocks=_LATE_BLOCKS,
            shared_bytes=_LATE_WARPS * _NOTES_BYTES + landing,
        )  # fmt: skip
