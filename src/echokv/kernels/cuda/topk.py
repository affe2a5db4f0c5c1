"""Exact top-k in one launch: a cluster of thread blocks a row. Contract in `reference/topk.py`."""

import ctypes
import math

import torch
from torch import Tensor

from echokv.kernels.checks import check_tensor
from echokv.kernels.cuda.launch import MAX_SHARED_BYTES, Arguments, CudaModule, pointer
from echokv.kernels.reference.topk import check_topk_args

MODULE = CudaModule("topk", threads=512)
KERNELS = ("topk",)

MAX_CLUSTER = 8
_SCORES_PER_BLOCK = 2048  # at least, where a cluster has more than one
HELD = 16 * 6 * 128
"""Scores of a block that stay in registers."""

_BINS, _LANES, _PAIRS = 256, 32, 2 * (32 + MAX_CLUSTER)
FIXED_SHARED_BYTES = 4 * (_BINS * _LANES + 2 * MAX_CLUSTER * _BINS + _BINS + _PAIRS + 4)
"""sizeof(TopkShared); the kept keys come after it."""

LIST_SHARED_BYTES = 4 * (_BINS * 8 + _BINS + 2 * _LANES + 2 * MAX_CLUSTER + 4)
"""sizeof(ListShared); lists and maps come after it."""

BY_LISTS = True
"""Whether rows go the common way of topk.cu first; the sure way alone is exact too."""

_LONG_ROW = 2**17  # scores; longer rows are sampled twice as densely
_WHOLE_ROW = 8192  # scores; rows up to here are listed without a bound


class TopkArguments(Arguments):
    """See topk.cu."""

    _fields_ = (
        ("scores", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("kth", ctypes.c_void_p),
        ("width", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("chunk", ctypes.c_int32),
        ("cached", ctypes.c_int32),
        ("listed", ctypes.c_int32),
        ("samples", ctypes.c_int32),
    )


def topk(
    scores: Tensor, context_lens: Tensor, k: int, kth_scores: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The k best of each row of scores [T, W]: [T, k] int32 positions and [T] k-th scores.

    kth_scores, [T] float32, is where those go; None: somewhere new. A row's is written as soon as
    it is known, before its positions, for whoever fetches rows beside.
    """
    check_topk_args(scores, context_lens, k)
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
    cluster = cluster_size(rows, width, sms)
    chunk, cached, shared_bytes = part_of_row(width, cluster)
    samples = samples_of(width)
    listed, list_bytes = list_of_row(width, chunk, k, samples) if BY_LISTS else (0, 0)
    shared_bytes = max(shared_bytes, list_bytes)
    arguments = TopkArguments(
        pointer(scores), pointer(context_lens), pointer(positions), pointer(kth),
        width, k, chunk, cached, listed, samples,
    )  # fmt: skip
    MODULE.launch(
        "topk", arguments, device, blocks=rows * cluster, shared_bytes=shared_bytes,
        cluster=cluster, beside=kth_scores is not None,
    )  # fmt: skip
    return positions, kth


def cluster_size(rows: int, width: int, sms: int) -> int:
    """Blocks a row: as many as fit the device at once, but none with next to nothing to do."""
    size = MAX_CLUSTER
    while size > 1 and (rows * size > sms or width < size * _SCORES_PER_BLOCK):
        size //= 2
    return size


def samples_of(width: int) -> int:
    """Scores of a row that its bound is guessed from."""
    return 2048 if width <= _LONG_ROW else 4096


def list_of_row(width: int, chunk: int, k: int, samples: int) -> tuple[int, int]:
    """How long a list for a row may get, and the bytes of shared memory for that.

    The bound is the sample's entry that is expected at rank k, and five standard deviations lower,
    so that the list has all of the k best; its length has room for six more. (0, 0) where that
    exceeds a block's shared memory.
    """
    if width <= _WHOLE_ROW:
        listed = width
    else:
        expected = k * samples / width
        rank = expected + 5 * math.sqrt(expected) + 4
        listed = max(samples, int((rank + 6 * math.sqrt(rank)) * width / samples))
    listed = -(-listed // 512) * 512
    nbytes = LIST_SHARED_BYTES + 4 * (3 * listed + 2 * -(-chunk // 32))
    return (listed, nbytes) if nbytes <= MAX_SHARED_BYTES else (0, 0)


def part_of_row(width: int, cluster: int) -> tuple[int, int, int]:
    """Scores of a block, how many it keeps, and the bytes of shared memory it needs for that."""
    chunk = -(-width // cluster)
    chunk = -(-chunk // 4) * 4
    cached = min(chunk, (MAX_SHARED_BYTES - FIXED_SHARED_BYTES) // 16 * 4)
    if chunk <= HELD:
        cached = 0
    return chunk, cached, FIXED_SHARED_BYTES + 4 * cached
