"""The lightning indexer's scores of fp8 keys; contract in `reference/index_scores.py`.

Two launches: one quantises the queries into images that the other multiplies by. The second starts
while the first runs, and waits for it only where it needs the queries. `index_scores_prefetch` also
fetches rows that beat a prediction, while the scores are being made.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from echokv.kernels.checks import check_tensor
from echokv.kernels.cuda import prefill_scores
from echokv.kernels.cuda.launch import Arguments, CudaModule, pointer
from echokv.kernels.cuda.recall import Layer, layer_of, moves_16_bytes
from echokv.kernels.cuda.schedule import Contexts
from echokv.kernels.fused_layer import FusedLayer
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
    "fetch_late",
)

HEADS = (32, 64)
HEAD_DIM = 128

TILED_FROM = 4
"""Rows a request from which a pass is scored by `prefill_scores`; the bits are the same."""

RING_ENTRIES = 64
"""Candidates that a scoring warp can be ahead of the intake warp, and that of a fetching warp."""

_WARPS, _SCORING_WARPS, _FETCHING_WARPS = 20, 16, 2
_LATE_AT_ONCE = 4  # see prefetch.cuh
_LATE_BLOCKS = 48  # enough to saturate PCIe, wherever the top-k leaves room
_STAGES, _QUERY_STAGES, _PAGE_BYTES = 8, 5, 64 * (HEAD_DIM + 4)
SHARED_BYTES = (_STAGES + _QUERY_STAGES) * (_PAGE_BYTES + 16) + 16 * _STAGES
"""ScoresShared without what only prefetching needs."""
PREFETCHING_SHARED_BYTES = (
    SHARED_BYTES + 32 + (_SCORING_WARPS + _FETCHING_WARPS) * (8 + 12 * RING_ENTRIES)
)
"""All of it, but for what aligns its end."""


class QueryArguments(Arguments):
    """See index_scores.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "weights", "images")),
        ("factor", ctypes.c_float),
        *((name, ctypes.c_uint32) for name in ("rows", "heads", "is_bfloat16", "most")),
        *((name, ctypes.c_void_p) for name in ("counts", "host_slots", "scores")),
    )


class ScoresArguments(Arguments):
    """See index_scores.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("images", "pages", "block_tables", "request_rows")),
        ("contexts", Contexts),
        ("out", ctypes.c_void_p),
        ("blocks", ctypes.c_uint32),
    )


class PrefetchArguments(Arguments):
    """See prefetch.cuh."""

    _fields_ = (
        ("layer", Layer),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "request_slots", "thresholds", "enabled", "counts", "host_slots", "scores",
            )
        ),
        *((name, ctypes.c_uint32) for name in ("most", "rows_per_unit", "least", "rows")),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """What a pass over one layer found, on the device. T rows."""

    host_slots: Tensor  # [T, most] int32: distinct ones that were fetched; negative elsewhere
    scores: Tensor  # [T, most] float32: of the candidates, fetched or not; -inf past them
    counts: Tensor  # [T] int32: candidates
    layer: FusedLayer
    arguments: PrefetchArguments  # for `fetch_late`


class PrefetchingArguments(Arguments):
    """See index_scores.cu."""

    _fields_ = (("scores", ScoresArguments), ("prefetch", PrefetchArguments))


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


def index_scores_prefetch(
    query: Tensor,
    weights: Tensor,
    pages: Tensor,
    fmt: IndexKeyFormat,
    block_tables: Tensor,
    request_rows: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    request_slots: Tensor,
    thresholds: Tensor,
    enabled: Tensor,
    layer: FusedLayer,
    *,
    most: int,
    rows_per_unit: int,
    least: int,
) -> tuple[Tensor, Prefetch]:
    """`index_scores`, and while it runs, rows move that beat their request's prediction.

    A candidate is a position inside the context whose score is at least the row's threshold and
    whose row is absent from the layer when it is looked up. A row of the pass has a budget of
    least + context_len * rows_per_unit / BUDGET_UNIT candidates, at most `most`: the first that are
    found, in whatever order. Where prefetching is enabled they are fetched, each once however many
    requests share it, at priority `floor`, into the slots that are next on the ready list. What no
    warp has begun with when the last score is made is left to `fetch_late`; a candidate that comes
    faster than it can be noted may be forgotten. The scores are those of `index_scores`, bit for
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
        request_slots: [T] int32, each row's entry of thresholds and enabled; -1 for none.
        thresholds: [S] float32, predicted k-th scores; +inf and NaN: no prediction.
        enabled: [S] int32, 0 where nothing is to be fetched.
        layer: in place; totals count prefetched rows as recalled and allocated, and who left. The
            pool must have room for T * most rows beside what else is protected in this step. Rows
            of whole, aligned sixteen-byte words.
        most: candidates of a row, at most.
        rows_per_unit: of the budget, for each BUDGET_UNIT tokens of context.
        least: of the budget, whatever the context.

    Returns:
        [T, W] float32 scores, and what was found.
    """
    check_scores_args(
        query, weights, pages, fmt, block_tables, request_rows, context_lens, max_context_len
    )
    rows, heads, _ = query.shape
    device = query.device
    layer.check()
    check_tensor("request_slots", request_slots, (rows,), torch.int32, device=device)
    check_tensor("thresholds", thresholds, (None,), torch.float32, device=device)
    check_tensor("enabled", enabled, (thresholds.shape[0],), torch.int32, device=device)
    if not takes(query, pages, fmt) or not moves_16_bytes(layer.host_rows, layer.device_rows):
        raise ValueError(
            f"prefetching is made for fp8 keys of {HEAD_DIM} dimensions under {HEADS} heads and"
            f" rows of whole sixteen-byte words, got {fmt}, {heads} heads and rows of"
            f" {layer.device_rows.shape[1]} B"
        )
    if most < 1:
        raise ValueError(f"most must be at least 1, got {most}")
    out = torch.empty((rows, score_width(max_context_len)), device=device)
    host_slots = torch.empty((rows, most), dtype=torch.int32, device=device)
    found = torch.empty((rows, most), device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    arguments = PrefetchArguments(
        layer_of(layer), pointer(request_slots), pointer(thresholds), pointer(enabled),
        pointer(counts), pointer(host_slots), pointer(found), most, rows_per_unit, least, rows,
    )  # fmt: skip
    if rows:
        images = quantise_query(query, weights, (counts, host_slots, found))
        score_images(images, heads, pages, block_tables, request_rows, context_lens, out, arguments)
    return out, Prefetch(
        host_slots=host_slots, scores=found, counts=counts, layer=layer, arguments=arguments
    )


def fetch_late(prefetch: Prefetch) -> None:
    """Fetch the candidates that `index_scores_prefetch` hadn't begun with, in place.

    May run beside whatever takes no rows of the layer in, such as the top-k.

    Args:
        prefetch: what it returned.
    """
    entries = prefetch.host_slots.numel()
    if entries:
        blocks = min(_LATE_BLOCKS, -(-entries // (_WARPS * _LATE_AT_ONCE)))
        device = prefetch.host_slots.device
        MODULE.launch("fetch_late", prefetch.arguments, device, blocks=blocks)


def quantise_query(
    query: Tensor, weights: Tensor, candidates: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    """Rotate and quantise a query as keys are, and fold every factor into the weights.

    Args:
        query: [T, H, 128] float32 or bfloat16.
        weights: [T, H] float32.
        candidates: what a prefetch finds, to be emptied: [T] int32, [T, most] int32 and [T, most]
            float32.

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
    if candidates is not None:
        counts, host_slots, scores = candidates
        arguments.most = host_slots.shape[1]
        arguments.counts, arguments.host_slots = pointer(counts), pointer(host_slots)
        arguments.scores = pointer(scores)
    MODULE.launch("quantise_query", arguments, query.device, blocks=-(-rows * heads // _WARPS))
    return images


def score_images(
    images: Tensor,
    heads: int,
    pages: Tensor,
    block_tables: Tensor,
    request_rows: Tensor,
    context_lens: Tensor,
    out: Tensor,
    prefetch: PrefetchArguments | None = None,
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
        prefetch: what to fetch meanwhile.
    """
    device, (rows, width) = out.device, out.shape
    arguments: Arguments = ScoresArguments(
        pointer(images), pointer(pages), pointer(block_tables), pointer(request_rows),
        Contexts(pointer(context_lens), rows, width), pointer(out), block_tables.shape[1],
    )  # fmt: skip
    kernel, shared_bytes = f"index_scores_{heads}", SHARED_BYTES
    if prefetch is not None:
        arguments = PrefetchingArguments(arguments, prefetch)
        kernel, shared_bytes = f"prefetching_{heads}", PREFETCHING_SHARED_BYTES
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    MODULE.launch(kernel, arguments, device, blocks=sms, shared_bytes=shared_bytes, early=True)
