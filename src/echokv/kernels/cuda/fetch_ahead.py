"""Fetching rows that beat a prediction from finished scores, in one launch, beside the top-k.

What `prefetch_candidates`, lookup, free, allocate and recall do in sequence, but that candidates
are found in any order. It takes any scores; `index_scores_prefetch` does the same while they are
made, for the formats that it knows.
"""

import ctypes

import torch
from torch import Tensor

from echokv.kernels.checks import check_tensor
from echokv.kernels.cuda.index_scores import PrefetchArguments
from echokv.kernels.cuda.launch import Arguments, CudaModule, pointer
from echokv.kernels.cuda.recall import layer_of, moves_16_bytes
from echokv.kernels.cuda.schedule import Contexts
from echokv.kernels.fused_layer import FusedLayer
from echokv.kernels.prefetch_args import check_candidates_args

MODULE = CudaModule("fetch_ahead", threads=256)
KERNELS = ("fetch_ahead",)

QUEUE_BYTES = 12 * 64
"""sizeof(Queue), one a warp."""

_WARPS = 8


class AheadArguments(Arguments):
    """See fetch_ahead.cu."""

    _fields_ = (
        ("prefetch", PrefetchArguments),
        ("contexts", Contexts),
        *((name, ctypes.c_void_p) for name in ("scores", "block_tables", "request_rows")),
        ("blocks", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )


def fetches_rows_of(layer: FusedLayer) -> bool:
    """Whether rows are made of whole, aligned sixteen-byte words, which `fetch_ahead` needs."""
    return bool(moves_16_bytes(layer.host_rows, layer.device_rows))


def fetch_ahead(
    scores: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    request_rows: Tensor,
    request_slots: Tensor,
    thresholds: Tensor,
    enabled: Tensor,
    layer: FusedLayer,
    host_slots: Tensor,
    found: Tensor,
    num_found: Tensor,
    *,
    rows_per_unit: int,
    least: int,
) -> None:
    """Fetch absent rows whose score is at least the predicted k-th score, as far as budgets go.

    Rows enter at priority `floor`, each once however many requests share it, into the slots that
    are next on the ready list. May run beside whatever takes no rows of the layer in.

    Args:
        scores: [T, W] float32.
        context_lens: [T] int32.
        block_tables: [R, B] int32.
        request_rows: [T] int32.
        request_slots: [T] int32, each row's entry of thresholds and enabled; -1 for none.
        thresholds: [S] float32; +inf and NaN: no prediction.
        enabled: [S] int32, 0 where nothing is to be fetched.
        layer: in place; totals count what is fetched as recalled and allocated, and who left. The
            pool must have room for T * most rows beside what else is protected in this step.
        host_slots: [T, most] int32, all -1, in place: those that were fetched; negative elsewhere.
        found: [T, most] float32 out: scores of the candidates; the rest stays as it is.
        num_found: [T] int32, all 0, in place: how many candidates, at most the row's budget:
            least + context_len * rows_per_unit / BUDGET_UNIT, and most.
        rows_per_unit: see num_found.
        least: see num_found.
    """
    rows, most = host_slots.shape
    check_candidates_args(
        scores, context_lens, block_tables, request_rows, request_slots, thresholds, enabled,
        layer.host_to_device, most,
    )  # fmt: skip
    layer.check()
    device = scores.device
    check_tensor("host_slots", host_slots, (scores.shape[0], most), torch.int32, device=device)
    check_tensor("found", found, (rows, most), torch.float32, device=device)
    check_tensor("num_found", num_found, (rows,), torch.int32, device=device)
    if not fetches_rows_of(layer):
        raise ValueError(
            f"rows must be whole, aligned sixteen-byte words, got {layer.device_rows.shape[1]} B"
        )
    if rows == 0:
        return
    arguments = ahead_arguments(
        scores, context_lens, block_tables, request_rows, request_slots, thresholds, enabled,
        layer, host_slots, found, num_found, rows_per_unit, least,
    )  # fmt: skip
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    MODULE.launch("fetch_ahead", arguments, device, blocks=sms, shared_bytes=_WARPS * QUEUE_BYTES)


def ahead_arguments(
    scores: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    request_rows: Tensor,
    request_slots: Tensor,
    thresholds: Tensor,
    enabled: Tensor,
    layer: FusedLayer,
    host_slots: Tensor,
    found: Tensor,
    num_found: Tensor,
    rows_per_unit: int,
    least: int,
) -> AheadArguments:
    """What the kernel takes; see `fetch_ahead`."""
    rows, width = scores.shape
    prefetch = PrefetchArguments(
        layer_of(layer), pointer(request_slots), pointer(thresholds), pointer(enabled),
        pointer(num_found), pointer(host_slots), pointer(found), host_slots.shape[1],
        rows_per_unit, least, rows,
    )  # fmt: skip
    return AheadArguments(
        prefetch, Contexts(pointer(context_lens), rows, width), pointer(scores),
        pointer(block_tables), pointer(request_rows), block_tables.shape[1], 0,
    )  # fmt: skip
