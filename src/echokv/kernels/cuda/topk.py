"""Exact top-k in one launch: a cluster of thread blocks a row. Contract in `reference/topk.py`."""

import ctypes

import torch
from torch import Tensor

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
    )


def topk(scores: Tensor, context_lens: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of each row of scores [T, W]: [T, k] int32 positions and [T] k-th scores."""
    check_topk_args(scores, context_lens, k)
    rows, width = scores.shape
    device = scores.device
    positions = torch.empty((rows, k), dtype=torch.int32, device=device)
    kth = torch.empty((rows,), dtype=torch.float32, device=device)
    if rows == 0:
        return positions, kth
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    cluster = cluster_size(rows, width, sms)
    chunk, cached, shared_bytes = part_of_row(width, cluster)
    arguments = TopkArguments(
        pointer(scores), pointer(context_lens), pointer(positions), pointer(kth),
        width, k, chunk, cached,
    )  # fmt: skip
    MODULE.launch(
        "topk", arguments, device, blocks=rows * cluster, shared_bytes=shared_bytes, cluster=cluster
    )
    return positions, kth


def cluster_size(rows: int, width: int, sms: int) -> int:
    """Blocks a row: as many as fit the device at once, but none with next to nothing to do."""
    size = MAX_CLUSTER
    while size > 1 and (rows * size > sms or width < size * _SCORES_PER_BLOCK):
        size //= 2
    return size


def part_of_row(width: int, cluster: int) -> tuple[int, int, int]:
    """Scores of a block, how many it keeps, and the bytes of shared memory it needs for that."""
    chunk = -(-width // cluster)
    chunk = -(-chunk // 4) * 4
    cached = min(chunk, (MAX_SHARED_BYTES - FIXED_SHARED_BYTES) // 16 * 4)
    if chunk <= HELD:
        cached = 0
    return chunk, cached, FIXED_SHARED_BYTES + 4 * cached
