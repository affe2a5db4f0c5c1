"""Pinned host memory, which any GPU reads and writes directly: exact size, touched, registered.

torch's own pinned allocator rounds sizes up to a power of two and faults pages in one by one, so
this maps its memory itself: anonymous huge pages, spread over NUMA nodes, touched by several
threads, then registered with CUDA in chunks.
"""

import mmap
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from echokv.errors import CapacityError
from echokv.log import get_logger, progress
from echokv.memory.host_memory import online_numa_nodes, require_host_bytes
from echokv.memory.host_pages import chunks, interleave_over_numa_nodes, touch

logger = get_logger(__name__)

REGISTER_CHUNK_BYTES = 64 * 2**30
"""Most bytes of one registration; recent drivers refuse one range of 512 GiB or more."""

_GIB = 2**30


class Registrar(Protocol):
    """Makes ranges of host memory accessible to a device."""

    def register(self, address: int, nbytes: int) -> None:
        """Register one range; raises RuntimeError when the driver refuses."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register` of the range that begins at address."""
        ...


class CudaRegistrar:
    """cudaHostRegister, for every CUDA context and mapped into the device's address space."""

    _PORTABLE_AND_MAPPED = 1 | 2

    def register(self, address: int, nbytes: int) -> None:
        """See `Registrar`."""
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(address, nbytes, self._PORTABLE_AND_MAPPED))

    def unregister(self, address: int) -> None:
        """See `Registrar`."""
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostUnregister(address))


class PinnedBuffer:
    """One range of page-locked host memory, exactly as large as asked, zeroed.

    `close` only when no kernel that uses the memory is in flight and no view will be read: the
    device loses access at once, the bytes go back with the last view.

    Args:
        nbytes: size.
        what: its name in errors and on the progress bar.
        flag: what to change when memory does not suffice.
        registrar: None: `CudaRegistrar`.
        register_chunk_bytes: most bytes of one registration, a multiple of the page size.

    Attributes:
        tensor: [nbytes] uint8, page-aligned.

    Raises:
        CapacityError: not enough memory, or the driver refuses to register it.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        what: str,
        flag: str,
        registrar: Registrar | None = None,
        register_chunk_bytes: int = REGISTER_CHUNK_BYTES,
    ) -> None:
        assert register_chunk_bytes % mmap.PAGESIZE == 0, "chunks end on page boundaries"
        require_host_bytes(nbytes, what=what, flag=flag)
        self._registrar = registrar or CudaRegistrar()
        self._registered: list[int] = []
        self.tensor = _map_anonymous(nbytes, what, flag)
        interleave_over_numa_nodes(self.tensor.data_ptr(), nbytes, online_numa_nodes())
        touch(self.tensor, what)
        self._register(register_chunk_bytes, what, flag)

    def _register(self, chunk_bytes: int, what: str, flag: str) -> None:
        base, nbytes = self.tensor.data_ptr(), self.tensor.numel()
        pieces = list(chunks(nbytes, chunk_bytes))
        for start, size in progress(pieces, total=len(pieces), what=f"registering {what}"):
            try:
                self._registrar.register(base + start, size)
            except RuntimeError as error:
                self.close()
                raise CapacityError(
                    f"registering the {what} failed after {start / _GIB:.2f} of"
                    f" {nbytes / _GIB:.2f} GiB: {error}; check the limit on locked memory"
                    f" (ulimit -l) or lower {flag}"
                ) from error
            self._registered.append(base + start)
        logger.info("%s: %.2f GiB registered in %d chunks", what, nbytes / _GIB, len(pieces))

    def close(self) -> None:
        """Unregister and let go of the memory; safe to call twice."""
        while self._registered:
            self._registrar.unregister(self._registered.pop())
        self.tensor = torch.empty(0, dtype=torch.uint8)


def copy_in(
    target: Tensor, source: Tensor, *, register_chunk_bytes: int = REGISTER_CHUNK_BYTES
) -> None:
    """Copy rows from a device into a `PinnedBuffer`, or into plain memory; doesn't wait.

    In pieces that lie within one registration each: the driver refuses a copy that spans two
    ("invalid argument"). Kernels may read and write across.

    Args:
        target: [N, row_bytes] uint8, contiguous, a view of the buffer.
        source: [N, row_bytes] uint8, contiguous.
        register_chunk_bytes: what the buffer was registered in.
    """
    flat, rows = target.view(-1), source.view(-1)
    start = int(target.storage_offset())  # within the buffer: a storage begins where it does
    for begin, end in within_chunks(start, start + flat.numel(), register_chunk_bytes):
        piece = slice(begin - start, end - start)
        flat[piece].copy_(rows[piece], non_blocking=True)


def within_chunks(start: int, stop: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """A range cut at every multiple of chunk_bytes within it."""
    while start < stop:
        end = min(stop, (start // chunk_bytes + 1) * chunk_bytes)
        yield start, end
        start = end


def _map_anonymous(nbytes: int, what: str, flag: str) -> Tensor:
    """Fresh zero pages, huge where the kernel can; freed when the last view of the tensor goes."""
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise CapacityError(
            f"mapping {nbytes / _GIB:.2f} GiB for the {what} failed: {error}; lower {flag}"
        ) from error
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # a kernel without huge pages: slower to touch, not wrong
        logger.warning("%s: no huge pages: %s", what, error)
    return torch.frombuffer(mapping, dtype=torch.uint8)
