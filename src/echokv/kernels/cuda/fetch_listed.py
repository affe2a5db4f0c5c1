"""Fetching rows while `index_scores` makes the scores that name them, and beside the top-k.

`index_scores_prefetch` forks this launch; see prefetch.cuh for what passes between the two. What
both take is here: argument structures and the lists.
"""

import ctypes

from echokv.kernels.cuda.launch import Arguments, CudaModule, pointer
from echokv.kernels.cuda.layer import Layer, layer_of
from echokv.kernels.cuda.schedule import Contexts
from echokv.kernels.prefetch_args import CandidateLists, LayerPrefetch

THREADS = 128
"""Of a block."""

LISTS = 16
"""Lists of a scoring block, one a warp that scores."""

MODULE = CudaModule("fetch_listed", threads=THREADS)
KERNELS = ("fetch_listed",)

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


def prefetch_arguments(prefetch: LayerPrefetch) -> PrefetchArguments:
    """What kernels that fetch take."""
    found = prefetch.found
    rows, most = found.host_slots.shape
    return PrefetchArguments(
        layer_of(prefetch.layer), pointer(prefetch.request_slots), pointer(prefetch.thresholds),
        pointer(prefetch.limits), pointer(found.counts), pointer(found.host_slots),
        pointer(found.scores), most, prefetch.rows_per_unit, prefetch.least, rows,
    )  # fmt: skip


def listed_arguments(prefetch: LayerPrefetch, contexts: Contexts) -> ListedArguments:
    """What `fetch_listed` takes."""
    lists = prefetch.lists
    return ListedArguments(
        prefetch_arguments(prefetch), contexts, pointer(lists.entries), pointer(lists.epoch),
        pointer(prefetch.kth_scores), lists.entries.shape[1], 0,
    )  # fmt: skip


def fetch_listed(arguments: ListedArguments, lists: CandidateLists) -> None:
    """Fetch what is listed until all is, or k-th scores are known; a block for each that scores."""
    blocks, device = lists.entries.shape[0], lists.entries.device
    MODULE.launch("fetch_listed", arguments, device, blocks=blocks, beside=True)
