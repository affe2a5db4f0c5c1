"""The lightning indexer's scores of fp8 keys; contract in `reference/index_scores.py`.

Two launches: one quantises the queries into images that the other multiplies by. The second starts
while the first runs, and waits for it only where it needs the queries. `index_scores_prefetch` also
lists the rows that beat a prediction while the scores are being made, for `fetch_listed`.
"""

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from echokv.kernels.cuda import prefill_scores
from echokv.kernels.cuda.fetch_listed import LISTS, fetch_listed, listed_arguments
from echokv.kernels.cuda.fetch_listed import THREADS as FETCHING_THREADS
from echokv.kernels.cuda.launch import Arguments, CudaModule, pointer
from echokv.kernels.cuda.layer import moves_16_bytes
from echokv.kernels.cuda.schedule import Contexts
from echokv.kernels.fused_layer import FusedLayer
from echokv.kernels.prefetch_args import FUSED_HEAD_DIM as HEAD_DIM
from echokv.kernels.prefetch_args import FUSED_HEADS as HEADS
from echokv.kernels.prefetch_args import LayerPrefetch
from echokv.kernels.reference.index_scores import check_scores_args, score_width
from echokv.kernels.triton import index_scores as portable
from echokv.memory.formats import IndexKeyFormat

MODULE = CudaModule("index_scores", threads=640)
KERNELS = (
    "quantise_query",
    "index_scores_32",
    "index_scores_64",
    "prefetching_32",
    "prefetching_64",
)


TILED_FROM = 4
"""Rows a request from which a pass is scored by `prefill_scores`; the bits are the same."""

_WARPS = 20
_STAGES, _QUERY_STAGES, _PAGE_BYTES = 8, 5, 64 * (HEAD_DIM + 4)
SHARED_BYTES = (_STAGES + _QUERY_STAGES) * (_PAGE_BYTES + 16) + 16 * _STAGES
"""ScoresShared without what only prefetching needs."""
PREFETCHING_SHARED_BYTES = SHARED_BYTES + 176
"""All of it."""


class QueryArguments(Arguments):
    """See index_scores.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "weights", "images")),
        ("factor", ctypes.c_float),
        *((name, ctypes.c_uint32) for name in ("rows", "heads", "is_bfloat16", "most")),
        *((name, ctypes.c_void_p) for name in ("counts", "host_slots", "scores", "kth", "epoch")),
    )


class ScoresArguments(Arguments):
    """See index_scores.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("images", "pages", "block_tables", "request_rows")),
        ("contexts", Contexts),
        ("out", ctypes.c_void_p),
        ("blocks", ctypes.c_uint32),
    )


class ListingArguments(Arguments):
    """See index_scores.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("request_slots", "thresholds", "lists", "epoch")),
        ("readers", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )


class PrefetchingArguments(Arguments):
    """See index_scores.cu."""

    _fields_ = (("scores", ScoresArguments), ("listing", ListingArguments))


def index_scores(
    query: Tensor,
    weights: Tensor,
    pages: Tensor,
    fmt: IndexKeyFormat,
    block_tables: Tensor,
    request_rows: Tensor,
    context_lens: Tensor,
    max_context_len: int,
) -> Tensor:
    """Scores of query [T, H, D] against each row's keys: [T, W] float32, -inf past the context.

    fp8 keys of 128 dimensions under 32 or 64 heads; any other shape is Triton's.
    """
    check_scores_args(
        query, weights, pages, fmt, block_tables, request_rows, context_lens, max_context_len
    )
    if not takes(query, pages, fmt):
        return portable.index_scores(
            query, weights, pages, fmt, block_tables, request_rows, context_lens, max_context_len
        )
    rows, heads, _ = query.shape
    out = torch.empty((rows, score_width(max_context_len)), device=query.device)
    if rows:
        images = quantise_query(query, weights)
        tiled = rows >= TILED_FROM * block_tables.shape[0]
        score = prefill_scores.score_images if tiled else score_images
        score(images, heads, pages, block_tables, request_rows, context_lens, out)
    return out


def takes(query: Tensor, pages: Tensor, fmt: IndexKeyFormat) -> bool:
    """Whether the kernel of this folder is made for these shapes."""
    return (
        fmt.name == "fp8"
        and fmt.head_dim == HEAD_DIM
        and query.shape[1] in HEADS
        and pages.data_ptr() % 16 == 0
    )


def fetches(query: Tensor, pages: Tensor, fmt: IndexKeyFormat, layer: FusedLayer) -> bool:
    """Whether `index_scores_prefetch` is made for these: what `takes`, and rows of whole words."""
    return takes(query, pages, fmt) and bool(moves_16_bytes(layer.host_rows, layer.device_rows))


def index_scores_prefetch(
    query: Tensor,
    weights: Tensor,
    pages: Tensor,
    fmt: IndexKeyFormat,
    block_tables: Tensor,
    request_rows: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    prefetch: LayerPrefetch,
    fork: Callable[[], AbstractContextManager[None]],
) -> Tensor:
    """`index_scores`, and while it runs, and after, rows move that beat their request's prediction.

    A candidate is a position inside the context whose score is at least the row's threshold and
    whose row is absent from the layer when it is looked up. A row of the pass has a budget of
    least + context_len * rows_per_unit / BUDGET_UNIT candidates, at most `most` and its limit: the
    first that are found, in whatever order. They are fetched, each once however many requests share
    it, at priority `floor`, into the free slots that are next on the ready list, until there are no
    more, or the row's k-th score is written to kth_scores, which `topk` does. A candidate that
    comes when its warp's list is full is forgotten. The scores are those of `index_scores`, bit for
    bit.

    Args:
        query: [T, H, 128], and the rest as for `index_scores`, of shapes that `takes` allows.
        weights: [T, H] float32.
        pages: [n_pages, page_bytes] uint8.
        fmt: fp8.
        block_tables: [R, B] int32.
        request_rows: [T] int32.
        context_lens: [T] int32.
        max_context_len: the largest of context_lens.
        prefetch: of the layer, for these rows.
        fork: makes a second stream the current one, after all that the current one has been given
            so far. It must be joined before anything but `make_resident` takes rows of the layer
            in, and before they are read.

    Returns:
        [T, W] float32 scores.
    """
    check_scores_args(
        query, weights, pages, fmt, block_tables, request_rows, context_lens, max_context_len
    )
    (rows, heads, _), device, lists = query.shape, query.device, prefetch.lists
    prefetch.check(rows, device)
    if not fetches(query, pages, fmt, prefetch.layer):
        raise ValueError(
            f"prefetching is made for fp8 keys of {HEAD_DIM} dimensions under {HEADS} heads and"
            f" rows of whole sixteen-byte words, got {fmt}, {heads} heads and rows of"
            f" {prefetch.layer.device_rows.shape[1]} B"
        )
    out = torch.empty((rows, score_width(max_context_len)), device=device)
    if rows == 0:
        return out
    images = quantise_query(query, weights, prefetch)
    contexts = Contexts(pointer(context_lens), rows, out.shape[1])
    with fork():
        fetch_listed(listed_arguments(prefetch, contexts), lists)
    listing = ListingArguments(
        pointer(prefetch.request_slots), pointer(prefetch.thresholds), pointer(lists.entries),
        pointer(lists.epoch), FETCHING_THREADS // LISTS, 0,
    )  # fmt: skip
    score_images(images, heads, pages, block_tables, request_rows, context_lens, out, listing)
    return out


def quantise_query(query: Tensor, weights: Tensor, begin: LayerPrefetch | None = None) -> Tensor:
    """Rotate and quantise a query as keys are, and fold every factor into the weights.

    Args:
        query: [T, H, 128] float32 or bfloat16.
        weights: [T, H] float32.
        begin: a prefetch whose outputs are emptied, and whose lists' next epoch begins.

    Returns:
        [T, H * 132] uint8: the e4m3 bytes in the order that wgmma reads them (see index_scores.cu),
        then float32 weights * 128 ** -0.5 * the heads' scales.
    """
    rows, heads, dim = query.shape
    images = torch.empty((rows, heads * (dim + 4)), dtype=torch.uint8, device=query.device)
    arguments = QueryArguments(
        pointer(query), pointer(weights), pointer(images), dim**-0.5, rows, heads,
        query.dtype == torch.bfloat16,
    )  # fmt: skip
    if begin is not None:
        found = begin.found
        arguments.most = found.host_slots.shape[1]
        arguments.counts, arguments.host_slots = pointer(found.counts), pointer(found.host_slots)
        arguments.scores, arguments.kth = pointer(found.scores), pointer(begin.kth_scores)
        arguments.epoch = pointer(begin.lists.epoch)
    MODULE.launch(
        "quantise_query", arguments, query.device, blocks=-(-rows * heads // _WARPS),
        beside=begin is not None,
    )  # fmt: skip
    return images


def score_images(
    images: Tensor,
    heads: int,
    pages: Tensor,
    block_tables: Tensor,
    request_rows: Tensor,
    context_lens: Tensor,
    out: Tensor,
    listing: ListingArguments | None = None,
) -> None:
    """The second launch: scores of quantised queries.

    Args:
        images: [T, heads * 132] uint8 from `quantise_query`, the launch right before this one.
        heads: H.
        pages: [n_pages, 8448] uint8, aligned to 16 bytes.
        block_tables: [R, B] int32.
        request_rows: [T] int32.
        context_lens: [T] int32.
        out: [T, W] float32 out, W a multiple of 64.
        listing: where candidates go.
    """
    device, (rows, width) = out.device, out.shape
    arguments: Arguments = ScoresArguments(
        pointer(images), pointer(pages), pointer(block_tables), pointer(request_rows),
        Contexts(pointer(context_lens), rows, width), pointer(out), block_tables.shape[1],
    )  # fmt: skip
    kernel, shared_bytes = f"index_scores_{heads}", SHARED_BYTES
    if listing is not None:
        arguments = PrefetchingArguments(arguments, listing)
        kernel, shared_bytes = f"prefetching_{heads}", PREFETCHING_SHARED_BYTES
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    MODULE.launch(
        kernel, arguments, device, blocks=sms, shared_bytes=shared_bytes, early=True,
        beside=listing is not None,
    )  # fmt: skip
