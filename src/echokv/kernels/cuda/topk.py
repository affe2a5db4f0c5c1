"""Exact top-k in one launch: a cluster of thread blocks a row. Contracts in `reference/topk.py`."""

import ctypes
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from echokv.kernels.checks import check_tensor
from echokv.kernels.cuda.launch import (
    BESIDE_SHARED_BYTES,
    MAX_SHARED_BYTES,
    Arguments,
    CudaModule,
    pointer,
)
from echokv.kernels.reference.topk import check_topk_args, check_topk_rows_args
from echokv.memory.slots import BLOCK_TOKENS

MODULE = CudaModule("topk", threads=512)
KERNELS = ("topk",)

MAX_CLUSTER = 16
PORTABLE_CLUSTER = 8  # blocks that any Hopper runs together
_SCORES_PER_BLOCK = 4096  # at least, where a cluster has more than one
HELD = 16 * 4 * 128
"""Scores of a block that stay in registers."""

_BINS, _LANES, _PAIRS = 256, 32, 2 * (32 + MAX_CLUSTER)
FIXED_SHARED_BYTES = 4 * (_BINS * _LANES + 2 * MAX_CLUSTER * _BINS + _BINS + _PAIRS + 4)
"""sizeof(TopkShared); the kept keys come after it."""

LIST_SHARED_BYTES = 4 * (2048 + 2 * _LANES + 2 * MAX_CLUSTER + 8)
"""sizeof(ListShared); lists and maps come after it."""

BY_LISTS = True
"""Whether rows go the common way of topk.cu first; the sure way alone is exact too."""

_WHOLE_ROW = 8192  # scores; rows up to here are listed without a bound
_LONG_ROW = 2**18  # scores; from here more than 8 blocks are worth their slower barriers
_MAX_SAMPLES = 16  # of a thread: 4 * MAX_QUADS of topk_lists.cuh
_EXPECTED = 64  # samples among the k best, at least, unless that takes more


class NameArguments(Arguments):
    """`Names` of topk_part.cuh."""

    _fields_ = (
        ("request_rows", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("host_slots", ctypes.c_void_p),
        ("scores", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int64),
    )


class TopkArguments(Arguments):
    """See topk.cu."""

    _fields_ = (
        ("scores", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("kth", ctypes.c_void_p),
        ("names", NameArguments),
        ("width", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("chunk", ctypes.c_int32),
        ("cached", ctypes.c_int32),
        ("listed", ctypes.c_int32),
        ("quads_a_score", ctypes.c_float),
    )


@dataclass(frozen=True)
class Names:
    """Where names of the rows come from and go to."""

    request_rows: Tensor
    block_tables: Tensor
    host_slots: Tensor
    scores: Tensor


def topk(scores: Tensor, context_lens: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of each row of scores [T, W]: [T, k] int32 positions and [T] k-th scores."""
    check_topk_args(scores, context_lens, k)
    return _select(scores, context_lens, k, None, None)


def topk_rows(
    scores: Tensor,
    context_lens: Tensor,
    k: int,
    request_rows: Tensor,
    block_tables: Tensor,
    kth_scores: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions, k-th scores, host slots and scores of the k best of each row of scores [T, W].

    kth_scores, [T] float32, is where those go; None: somewhere new. A row's is written when its
    positions are, for whoever fetches rows beside.
    """
    check_topk_rows_args(scores, context_lens, k, request_rows, block_tables)
    shape, device = (scores.shape[0], k), scores.device
    slots = torch.empty(shape, dtype=torch.int32, device=device)
    chosen = torch.empty(shape, dtype=torch.float32, device=device)
    names = Names(request_rows, block_tables, slots, chosen)
    positions, kth = _select(scores, context_lens, k, kth_scores, names)
    return positions, kth, slots, chosen


def _select(
    scores: Tensor, context_lens: Tensor, k: int, kth_scores: Tensor | None, names: Names | None
) -> tuple[Tensor, Tensor]:
    """Positions and k-th scores; names the rows as well, if wanted."""
    rows, width = scores.shape
    device = scores.device
    positions = torch.empty((rows, k), dtype=torch.int32, device=device)
    kth = kth_scores
    if kth is None:
        kth = torch.empty((rows,), dtype=torch.float32, device=device)
    check_tensor("kth_scores", kth, (rows,), torch.float32, device=device)
    if rows == 0:
        return positions, kth
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    beside = kth_scores is not None  # where clusters of 16 blocks might find no place
    large = not beside and width >= _LONG_ROW and rows <= _large_clusters(device)
    cluster = cluster_size(rows, width, sms, MAX_CLUSTER if large else PORTABLE_CLUSTER)
    most_bytes = BESIDE_SHARED_BYTES if beside else MAX_SHARED_BYTES
    chunk, cached, shared_bytes = part_of_row(width, cluster, most_bytes)
    listed, bytes_of_lists = list_of_row(width, chunk, k) if BY_LISTS else (0, 0)
    shared_bytes = max(shared_bytes, bytes_of_lists)
    arguments = TopkArguments(
        pointer(scores), pointer(context_lens), pointer(positions), pointer(kth),
        name_arguments(names), width, k, chunk, cached, listed, quads_a_score(k),
    )  # fmt: skip
    MODULE.launch(
        "topk", arguments, device, blocks=rows * cluster, cluster=cluster,
        shared_bytes=shared_bytes, early=True, beside=beside,
    )  # fmt: skip
    return positions, kth


def name_arguments(names: Names | None) -> NameArguments:
    """What the kernel gets of them; nothing where rows aren't to be named."""
    if names is None:
        return NameArguments()
    tables, slots, scores = names.block_tables, names.host_slots, names.scores
    return NameArguments(
        pointer(names.request_rows), pointer(tables), pointer(slots), pointer(scores),
        tables.shape[1],
    )  # fmt: skip


@functools.cache
def _large_clusters(device: torch.device) -> int:
    return MODULE.clusters_at_once(
        "topk", device, cluster=MAX_CLUSTER, shared_bytes=MAX_SHARED_BYTES
    )


def cluster_size(rows: int, width: int, sms: int, most: int) -> int:
    """Blocks a row: as many as fit the device at once, but none with next to nothing to do."""
    if width <= _WHOLE_ROW:
        return 1
    size = most
    while size > 1 and (rows * size > sms or width < size * _SCORES_PER_BLOCK):
        size //= 2
    return size


def quads_a_score(k: int, threads: int = MODULE.threads) -> float:
    """Samples that a thread takes for each score of a row, in fours."""
    return _EXPECTED / (4 * k * threads)


def list_of_row(width: int, chunk: int, k: int) -> tuple[int, int]:
    """How long the lists for a row may get, and the bytes of shared memory for that.

    The bound lies five standard deviations below where a sample expects the k-th score, so that
    the lists have all of the k best; their length has room for six more. (0, 0) where that exceeds
    a block's shared memory.
    """
    threads = MODULE.threads
    if width <= _WHOLE_ROW:
        listed = width
    else:
        expected = min(_EXPECTED, k * threads * _MAX_SAMPLES / width)
        rank = 1.3125 * expected + 24 + threads // _LANES  # as sampled_bound's
        listed = int((rank + 6 * math.sqrt(rank)) * k / expected)
    listed = -(-max(listed, threads) // threads) * threads
    nbytes = list_bytes(listed, chunk)
    return (listed, nbytes) if nbytes <= MAX_SHARED_BYTES else (0, 0)


def list_bytes(listed: int, chunk: int) -> int:
    """Shared memory of a block for so long a list and so many scores."""
    blocks = chunk // BLOCK_TOKENS + 2  # one begun at either end
    return LIST_SHARED_BYTES + 4 * (3 * listed + 3 * -(-chunk // _LANES) + blocks)


def part_of_row(
    width: int, cluster: int, most_bytes: int = MAX_SHARED_BYTES
) -> tuple[int, int, int]:
    """Scores of a block, how many it keeps, and the bytes of shared memory it needs for that."""
    chunk = -(-width // cluster)
    chunk = -(-chunk // 4) * 4
    cached = min(chunk, (most_bytes - FIXED_SHARED_BYTES) // 16 * 4)
    if chunk <= HELD:
        cached = 0
    return chunk, cached, FIXED_SHARED_BYTES + 4 * cached
