"""The lightning indexer's scores of fp8 keys for passes with many rows of a request.

Contract in `reference/index_scores.py`, bits of `index_scores.py`: rows that stand next to each
other share the keys that they read.
"""

import ctypes

import torch
from torch import Tensor

from echokv.kernels.cuda.index_scores import Contexts, quantise_query
from echokv.kernels.cuda.launch import Arguments, CudaModule, pointer
from echokv.kernels.reference.index_scores import check_scores_args, score_width
from echokv.memory.formats import IndexKeyFormat

MODULE = CudaModule("prefill_scores", threads=512)
KERNELS = ("prefill_scores_32", "prefill_scores_64")
SHARED_BYTES = 219_904
TILE_ROWS, UNIT_TOKENS = 8, 128
"""Of the schedule in tiles.cuh."""


class Rows(Arguments):
    """See tiles.cuh."""

    _fields_ = (("contexts", Contexts), ("requests", ctypes.c_void_p))


class PrefillArguments(Arguments):
    """See prefill_scores.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("images", "pages", "block_tables")),
        ("rows", Rows),
        ("out", ctypes.c_void_p),
        ("blocks", ctypes.c_uint32),
    )


def prefill_scores(
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

    fp8 keys of 128 dimensions under 32 or 64 heads (`index_scores.takes`).
    """
    check_scores_args(
        query, weights, pages, fmt, block_tables, request_rows, context_lens, max_context_len
    )
    rows, heads, _ = query.shape
    out = torch.empty((rows, score_width(max_context_len)), device=query.device)
    if rows:
        images = quantise_query(query, weights)
        score_images(images, heads, pages, block_tables, request_rows, context_lens, out)
    return out


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
    arguments = PrefillArguments(
        pointer(images), pointer(pages), pointer(block_tables),
        Rows(Contexts(pointer(context_lens), rows, width), pointer(request_rows)),
        pointer(out), block_tables.shape[1],
    )  # fmt: skip
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    MODULE.launch(
        f"prefill_scores_{heads}", arguments, device,
        blocks=sms, shared_bytes=SHARED_BYTES, early=True,
    )  # fmt: skip
