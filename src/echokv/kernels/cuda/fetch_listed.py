"""Fetching rows while `index_scores` makes the scores that name them, and beside the top-k.

`index_scores_prefetch` forks this launch; see prefetch.cuh for what passes between the two. What
both take is here: argument structures and the lists.
"""

import ctypes

import torch
from torch import Tensor

from echokv.kernels.cuda.launch import MAX_SHARED_BYTES, Arguments, CudaModule, pointer
from echokv.kernels.cuda.layer import Layer, layer_of
from echokv.kernels.cuda.schedule import Contexts
from echokv.kernels.fused_layer import FusedLayer
from echokv.kernels.prefetch_args import CandidateLists, Candidates

THREADS = 1024
"""Of a block."""

MODULE = CudaModule("fetch_listed", threads=THREADS)
KERNELS = ("fetch_listed",)

SKETCH = (256, 256)
"""Rows of a pass that prefetch, and bins of each by score: see prefetch.cuh."""

LIST_ENTRIES = 2048
"""Candidates of a scoring block; it forgets what comes after them."""

BOX_WORDS = 8 + 4 + 8 * 32 * 2

QUEUE_ENTRIES = 4096
"""Of each of a cluster's two."""


MARGIN = 0.125
CLUSTERS, CLUSTER = 4, 2
FINDING_WARPS = 16


def movers() -> int:
    return 32 if CLUSTER > 1 else THREADS // 32 - FINDING_WARPS


def own_sms() -> int:
    return CLUSTERS * CLUSTER


class PrefetchArguments(Arguments):
    """See prefetch.cuh."""

    _fields_ = (
        ("layer", Layer),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "request_slots", "thresholds", "limits", "counts", "host_slots", "scores",
            )
        ),
        *((name, ctypes.c_uint32) for name in ("most", "rows_per_unit", "least", "rows")),
    )  # fmt: skip


class ListedArguments(Arguments):
    """See prefetch.cuh."""

    _fields_ = (
        ("prefetch", PrefetchArguments),
        ("contexts", Contexts),
        *(
            (name, ctypes.c_void_p)
            for name in ("lists", "queues", "epoch", "kth", "scored", "sketch", "boxes", "bars")
        ),
        ("num_lists", ctypes.c_uint32),
        ("k", ctypes.c_uint32),
        ("margin", ctypes.c_float),
        ("group", ctypes.c_uint32),
    )


def prefetch_arguments(
    layer: FusedLayer,
    request_slots: Tensor,
    thresholds: Tensor,
    limits: Tensor,
    found: Candidates,
    rows_per_unit: int,
    least: int,
) -> PrefetchArguments:
    """What kernels that fetch take; see `index_scores_prefetch`."""
    rows, most = found.host_slots.shape
    return PrefetchArguments(
        layer_of(layer), pointer(request_slots), pointer(thresholds), pointer(limits),
        pointer(found.counts), pointer(found.host_slots), pointer(found.scores), most,
        rows_per_unit, least, rows,
    )  # fmt: skip


def listed_arguments(
    prefetch: PrefetchArguments,
    contexts: Contexts,
    lists: CandidateLists,
    kth_scores: Tensor,
    num_lists: int,
    topk: int,
    group: int,
) -> ListedArguments:
    """What `fetch_listed` takes."""
    return ListedArguments(
        prefetch, contexts, pointer(lists.entries), pointer(lists.queues), pointer(lists.epoch),
        pointer(kth_scores),
        pointer(lists.scored), pointer(lists.sketch), pointer(lists.boxes),
        pointer(lists.bars), num_lists, topk, MARGIN, group,
    )  # fmt: skip


def fetch_listed(arguments: ListedArguments, device: torch.device) -> None:
    """Fetch what is listed until all is, or k-th scores are known, on SMs of its own."""
    MODULE.launch(
        "fetch_listed", arguments, device, blocks=own_sms(),
        shared_bytes=MAX_SHARED_BYTES, beside=True,
    )  # fmt: skip
