"""The lightning indexer's scores of fp8 keys for passes with many rows of a request.

Contract in `reference/index_scores.py`, bits of `index_scores.py`, which calls this: rows that
stand next to each other share the keys that they read.
"""

import ctypes

import torch
from torch import Tensor

from echokv.kernels.cuda.launch import Arguments, CudaModule, pointer
from echokv.kernels.cuda.schedule import Contexts, Rows

MODULE = CudaModule("prefill_scores", threads=512)
KERNELS = (
    "prefill_scores_32",
    "prefill_scores_64",
    "prefill_prefetching_32",
    "prefill_prefetching_64",
    "prefill_fetch_late",
)
SHARED_BYTES = 202_976
"""Shared in prefill_scores.cu, without what only prefetching needs."""


class PrefillArguments(Arguments):
    """See prefill_scores.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("images", "pages", "block_tables")),
        ("rows", Rows),
        ("out", ctypes.c_void_p),
        ("blocks", ctypes.c_uint32),
    )


def score_images(
    images: Tensor,
    heads: int,
    pages: Tensor,
    block_tables: Tensor,
    request_rows: Tensor,
    context_lens: Tensor,
    out: Tensor,
) -> None:
    """Scores of quantised queries.

    Args:
        images: [T, heads * 132] uint8 from `quantise_query`, the launch right before this one.
        heads: H, 32 or 64.
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
