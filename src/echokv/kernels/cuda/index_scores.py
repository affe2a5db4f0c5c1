"""The lightning indexer's scores of fp8 keys; contract in `reference/index_scores.py`.

Two launches: one quantises the queries into images that the other multiplies by. The second starts
while the first runs, and waits for it only where it needs the queries.
"""

import ctypes

import torch
from torch import Tensor

from echokv.kernels.cuda.launch import Arguments, CudaModule, pointer
from echokv.kernels.reference.index_scores import check_scores_args, score_width
from echokv.kernels.triton import index_scores as portable
from echokv.memory.formats import IndexKeyFormat

MODULE = CudaModule("index_scores", threads=640)
KERNELS = ("quantise_query", "index_scores_32", "index_scores_64")

HEADS = (32, 64)
HEAD_DIM = 128

_WARPS = 20
_STAGES, _QUERY_STAGES, _PAGE_BYTES = 16, 5, 64 * (HEAD_DIM + 4)
SHARED_BYTES = (_STAGES + _QUERY_STAGES) * (_PAGE_BYTES + 16) + 16 * _STAGES
"""sizeof(ScoresShared), but for what aligns its end."""


class QueryArguments(Arguments):
    """See index_scores.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "weights", "images")),
        ("factor", ctypes.c_float),
        *((name, ctypes.c_uint32) for name in ("rows", "heads", "is_bfloat16")),
    )


class Contexts(Arguments):
    """See schedule.cuh."""

    _fields_ = (
        ("lens", ctypes.c_void_p),
        ("rows", ctypes.c_uint32),
        ("width", ctypes.c_uint32),
    )


class ScoresArguments(Arguments):
    """See index_scores.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("images", "pages", "block_tables", "request_rows")),
        ("contexts", Contexts),
        ("out", ctypes.c_void_p),
        ("blocks", ctypes.c_uint32),
    )


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
        score_images(images, heads, pages, block_tables, request_rows, context_lens, out)
    return out


def takes(query: Tensor, pages: Tensor, fmt: IndexKeyFormat) -> bool:
    """Whether the kernel of this folder is made for these shapes."""
    return (
        fmt.name == "fp8"
        and fmt.head_dim == HEAD_DIM
        and query.shape[1] in HEADS
        and pages.data_ptr() % 16 == 0
    )


def quantise_query(query: Tensor, weights: Tensor) -> Tensor:
    """Rotate and quantise a query as keys are, and fold every factor into the weights.

    Args:
        query: [T, H, 128] float32 or bfloat16.
        weights: [T, H] float32.

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
    """
    device, (rows, width) = out.device, out.shape
    arguments = ScoresArguments(
        pointer(images), pointer(pages), pointer(block_tables), pointer(request_rows),
        Contexts(pointer(context_lens), rows, width), pointer(out), block_tables.shape[1],
    )  # fmt: skip
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    MODULE.launch(
        f"index_scores_{heads}", arguments, device, blocks=sms, shared_bytes=SHARED_BYTES,
        early=True,
    )  # fmt: skip
