"""Managed host memory, which a GPU maps in large pages: random rows come from it twice as fast.

A GPU maps pinned memory in small pages, whatever the host's are. Its cache of translations reaches
some 1 GiB of those, and rows of a larger pool wait for page walks, as does whatever else reads
memory meanwhile. CUDA's managed memory, told to stay on the host and to be mapped into the device,
lies in chunks of up to 2 MiB (figures in docs/performance.md, "Reading host memory").
"""

import ctypes
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from echokv.errors import CapacityError
from echokv.log import get_logger, progress
from echokv.memory.host_memory import online_numa_nodes, require_host_bytes
from echokv.memory.host_pages import TOUCH_CHUNK_BYTES, chunks, touch

logger = get_logger(__name__)

_GIB = 2**30


class ManagedDriver(Protocol):
    """What CUDA does for managed memory; each raises RuntimeError when the driver refuses."""

    def allocate(self, nbytes: int) -> int:
        """Address of so many bytes without pages yet."""
        ...

    def keep_on_host(self, address: int, nbytes: int, node: int | None) -> None:
        """Prefer the host for a range, of one NUMA node or any."""
        ...

    def map(self, address: int, nbytes: int) -> None:
        """Map a range's pages into the device, where they are."""
        ...

    def free(self, address: int) -> None:
        """Give an allocation back."""
        ...


class CudaManagedDriver:
    """cuMemAllocManaged and cuMemAdvise.

    Args:
        device: the GPU that uses the memory.
    """

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._device = _device_number(device)
        self._enter()

    def allocate(self, nbytes: int) -> int:
        """See `ManagedDriver`."""
        attach = self._driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
        return int(self._result(self._driver.cuMemAllocManaged(nbytes, attach.value)))

    def keep_on_host(self, address: int, nbytes: int, node: int | None) -> None:
        """See `ManagedDriver`."""
        places = self._driver.CUmemLocationType
        kind = (
            places.CU_MEM_LOCATION_TYPE_HOST
            if node is None
            else places.CU_MEM_LOCATION_TYPE_HOST_NUMA
        )
        advice = self._driver.CUmem_advise.CU_MEM_ADVISE_SET_PREFERRED_LOCATION
        self._advise(address, nbytes, advice, kind, node or 0)

    def map(self, address: int, nbytes: int) -> None:
        """See `ManagedDriver`."""
        kind = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        advice = self._driver.CUmem_advise.CU_MEM_ADVISE_SET_ACCESSED_BY
        self._advise(address, nbytes, advice, kind, self._device)

    def free(self, address: int) -> None:
        """See `ManagedDriver`; of any thread, when the device is done with it."""
        self._enter()
        self._result(self._driver.cuMemFree(self._driver.CUdeviceptr(address)))

    def _enter(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().synchronize()  # makes torch's context current

    def _advise(self, address: int, nbytes: int, advice: object, kind: object, number: int) -> None:
        place = self._driver.CUmemLocation()
        place.type, place.id = kind, number
        pointer = self._driver.CUdeviceptr(address)
        self._result(self._driver.cuMemAdvise(pointer, nbytes, advice, place))

    def _result(self, returned: tuple[Any, ...]) -> Any:
        error, *values = returned
        if error != self._driver.CUresult.CUDA_SUCCESS:
            _, text = self._driver.cuGetErrorString(error)
            raise RuntimeError(text.decode() if text else str(error))
        return values[0] if values else None


class ManagedBuffer:
    """One range of managed memory that stays on the host, exactly as large as asked, zeroed.

    `close` only when no kernel that uses the memory is in flight; the bytes go back with the last
    view.

    Args:
        nbytes: size.
        what: its name in errors and on the progress bar.
        flag: what to change when memory does not suffice.
        driver: `CudaManagedDriver` of the device that uses it.

    Attributes:
        tensor: [nbytes] uint8 on the CPU, page-aligned.

    Raises:
        CapacityError: not enough memory, or the driver refuses.
    """

    def __init__(self, nbytes: int, *, what: str, flag: str, driver: ManagedDriver) -> None:
        require_host_bytes(nbytes, what=what, flag=flag)
        self._driver = driver
        try:
            self.tensor = self._allocate(nbytes)
            self._place(online_numa_nodes())
            touch(self.tensor, what)
            self._map(what)
        except RuntimeError as error:
            raise CapacityError(
                f"{nbytes / _GIB:.2f} GiB of managed memory for the {what} failed: {error}; lower"
                f" {flag}, or take --host-memory pinned"
            ) from error
        logger.info("%s: %.2f GiB of managed memory", what, nbytes / _GIB)

    def close(self) -> None:
        """Let go of the memory; safe to call twice."""
        self.tensor = torch.empty(0, dtype=torch.uint8)

    def _allocate(self, nbytes: int) -> Tensor:
        address = self._driver.allocate(nbytes)
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        # Views of the tensor keep `memory`; at the interpreter's end the process gives it back.
        weakref.finalize(memory, self._driver.free, address).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _place(self, nodes: list[int]) -> None:
        address, nbytes = self.tensor.data_ptr(), self.tensor.numel()
        self._driver.keep_on_host(address, nbytes, None)
        if len(nodes) < 2:
            return
        try:
            for index, (start, size) in enumerate(chunks(nbytes, TOUCH_CHUNK_BYTES)):
                self._driver.keep_on_host(address + start, size, nodes[index % len(nodes)])
        except RuntimeError as error:  # slower, not wrong: they are on the host already
            logger.warning("host memory: not spread over NUMA nodes %s: %s", nodes, error)
        else:
            logger.info("host memory: spread over NUMA nodes %s", nodes)

    def _map(self, what: str) -> None:
        # After the pages are there: a page that came after would be mapped at a first access only.
        address = self.tensor.data_ptr()
        pieces = list(chunks(self.tensor.numel(), TOUCH_CHUNK_BYTES))
        for start, size in progress(pieces, total=len(pieces), what=f"mapping {what}"):
            self._driver.map(address + start, size)


def managed_refusal(device: torch.device) -> str | None:
    """Why a device can't use managed memory that stays on the host; None when it can."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return "cuda-bindings isn't installed"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    torch.cuda.init()
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS
    error, value = driver.cuDeviceGetAttribute(attribute, _device_number(device))
    if error != driver.CUresult.CUDA_SUCCESS or not value:
        return f"{device} can't access managed memory while the host does"
    return None


def _device_number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
