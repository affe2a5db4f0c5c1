"""Pages of host memory: fault them in, spread them over NUMA nodes."""

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from echokv.log import get_logger, progress

logger = get_logger(__name__)

TOUCH_CHUNK_BYTES = 256 * 2**20
"""Bytes that one thread touches at a time; the progress bar moves in these."""

_MAX_TOUCH_THREADS = 32
_MPOL_INTERLEAVE = 3
_MBIND_SYSCALL = {"x86_64": 237, "aarch64": 235}


def chunks(nbytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Start and size of each chunk of so many bytes; the last one may be smaller."""
    for start in range(0, nbytes, chunk_bytes):
        yield start, min(chunk_bytes, nbytes - start)


def touch(tensor: Tensor, what: str) -> None:
    """Fault every page in, in parallel: ctypes calls run without the interpreter lock."""
    base, pieces = tensor.data_ptr(), list(chunks(tensor.numel(), TOUCH_CHUNK_BYTES))

    def zero(piece: tuple[int, int]) -> None:
        ctypes.memset(base + piece[0], 0, piece[1])

    threads = min(_MAX_TOUCH_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        done = pool.map(zero, pieces)
        for _ in progress(done, total=len(pieces), what=f"touching {what}", unit="chunk"):
            continue


def interleave_over_numa_nodes(
    address: int,
    nbytes: int,
    nodes: list[int],
    mbind: Callable[[int, int, int, list[int]], None] | None = None,
) -> None:
    """Spread untouched pages evenly over NUMA nodes; does nothing when there is only one.

    One node's memory would otherwise fill up, or one socket's link carry every transfer. A kernel
    that refuses is logged: placement is a matter of speed only.

    Args:
        address: page-aligned start.
        nbytes: size of the range.
        nodes: nodes that have memory.
        mbind: stands in for the system call in tests: address, nbytes, policy, nodes.
    """
    if len(nodes) < 2:
        logger.info("host memory: one NUMA node, nothing to spread")
        return
    try:
        (mbind or _mbind)(address, nbytes, _MPOL_INTERLEAVE, nodes)
    except OSError as error:
        logger.warning("host memory: not spread over NUMA nodes %s: %s", nodes, error)
    else:
        logger.info("host memory: spread over NUMA nodes %s", nodes)


def _mbind(address: int, nbytes: int, policy: int, nodes: list[int]) -> None:
    """The mbind system call (man 2 mbind); raises OSError when it fails."""
    number = _MBIND_SYSCALL.get(platform.machine())
    if number is None:
        raise OSError(f"mbind's number on {platform.machine()} is unknown")
    words = (ctypes.c_ulong * (max(nodes) // 64 + 1))()
    for node in nodes:
        words[node // 64] |= 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    status = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(policy),
        words,
        ctypes.c_ulong(64 * len(words) + 1),
        ctypes.c_uint(0),
    )
    if status:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
