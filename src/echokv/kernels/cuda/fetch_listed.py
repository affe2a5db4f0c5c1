"""Fetching rows while `index_scores` makes the scores that name them, and beside the top-k.

`index_scores_prefetch` forks this launch; see prefetch.cuh for what passes between the two. What
both take is here: argument structures and the lists.
"""

import ctypes

from torch import Tensor

from echokv.kernels.cuda.launch import Arguments, CudaModule, pointer
from echokv.kernels.cuda.layer import Layer, layer_of
from echokv.kernels.cuda.schedule import Contexts
from echokv.kernels.fused_layer import FusedLayer
from echokv.kernels.prefetch_args import CandidateLists, Candidates

THREADS = 128
"""Of a block."""

LISTS = 16
"""Lists of a scoring block, one a warp that scores."""

MODULE = CudaModule("fetch_listed", threads=THREADS)
KERNELS = ("fetch_listed",)

_LINE = 128

LIST_ENTRIES = 128
"""Candidates of a scoring warp; it forgets what comes after them."""


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
        *((name, ctypes.c_void_p) for name in ("lists", "epoch", "kth")),
        ("num_lists", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
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
) -> ListedArguments:
    """What `fetch_listed` takes."""
    return ListedArguments(
        prefetch, contexts, pointer(lists.entries), pointer(lists.epoch), pointer(kth_scores),
        lists.entries.shape[1], 0,
    )  # fmt: skip


def fetch_listed(arguments: ListedArguments, lists: CandidateLists) -> None:
    """Fetch what is listed until all is, or k-th scores are known; a block for each that scores."""
    blocks, device = lists.entries.shape[0], lists.entries.device
    shared_bytes = fetching_bytes(THREADS // 32, arguments.prefetch.layer.row_bytes)
    MODULE.launch(
        "fetch_listed", arguments, device, blocks=blocks, shared_bytes=shared_bytes, beside=True
    )


def fetching_bytes(warps: int, row_bytes: int) -> int:
    """Shared memory of so many warps that fetch; see prefetch.cuh and landing.cuh."""
    landing = _LINE + -(-(row_bytes + _LINE - 16) // _LINE) * _LINE
    return _LINE + warps * landing
