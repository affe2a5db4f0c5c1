"""The three pools of bytes: host rows, device rows, index-key pages.

Know sizes and where the memory is; what the bytes mean is `memory.formats` and the kernels.
"""

import torch
from torch import Tensor

from echokv.errors import CapacityError, ConfigError
from echokv.log import get_logger
from echokv.memory.host_memory import require_host_bytes
from echokv.memory.managed import CudaManagedDriver, ManagedBuffer, managed_refusal
from echokv.memory.pinned import PinnedBuffer
from echokv.memory.slots import BLOCK_TOKENS

logger = get_logger(__name__)

HOST_MEMORY_KINDS = ("auto", "managed", "pinned")

_GIB = 2**30


class DevicePool:
    """Rows of every layer in device memory.

    Args:
        num_layers: L.
        num_slots: N_G, device slots a layer.
        row_bytes: bytes a row.
        device: where.

    Attributes:
        rows: [L, N_G, row_bytes] uint8, zeroed.

    Raises:
        CapacityError: the device doesn't have that much memory.
    """

    def __init__(
        self, num_layers: int, num_slots: int, row_bytes: int, device: torch.device
    ) -> None:
        self.num_slots = num_slots
        self.rows = _zeros(
            (num_layers, num_slots, row_bytes), device, "device pool", "--device-pool-tokens"
        )


class IndexKeyPool:
    """Indexer keys of every layer that has an indexer, in device memory, by pages of 64 tokens.

    Args:
        num_index_layers: L_index.
        num_pages: as many as the host pool has blocks; page id == host block id.
        page_bytes: bytes a page.
        device: where.

    Attributes:
        pages: [L_index, n_pages, page_bytes] uint8, zeroed.

    Raises:
        CapacityError: the device doesn't have that much memory.
    """

    def __init__(
        self, num_index_layers: int, num_pages: int, page_bytes: int, device: torch.device
    ) -> None:
        self.num_pages = num_pages
        self.pages = _zeros(
            (num_index_layers, num_pages, page_bytes), device, "index keys", "--host-pool-gib"
        )


class HostPool:
    """Rows of every layer in host memory, which the device reads and writes directly.

    Args:
        num_layers: L.
        num_slots: N_H, a multiple of 64.
        row_bytes: bytes a row.
        device: the device that uses it; a CPU gets plain memory.
        kind: of a GPU's memory: managed, pinned, or auto, which is managed where the GPU can.
        memory: [bytes] uint8, of another pool, to lie in, which outlives this one; None: its own.

    Attributes:
        rows: [L, N_H, row_bytes] uint8 on the CPU, zeroed; in `memory`, as that is.

    Raises:
        CapacityError: the host doesn't have that much memory.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        row_bytes: int,
        device: torch.device,
        kind: str = "auto",
        memory: Tensor | None = None,
    ) -> None:
        assert num_slots % BLOCK_TOKENS == 0, f"{num_slots} host slots are not whole blocks"
        self.num_slots = num_slots
        shape = (num_layers, num_slots, row_bytes)
        nbytes = num_layers * num_slots * row_bytes
        self._buffer: ManagedBuffer | PinnedBuffer | None = None
        if memory is not None:
            assert memory.numel() >= nbytes, f"{memory.numel()} bytes don't hold {nbytes}"
            self.rows = memory[:nbytes].view(shape)
        elif device.type == "cpu":
            require_host_bytes(nbytes, what="host pool", flag="--host-pool-gib")
            self.rows = torch.zeros(shape, dtype=torch.uint8)
        else:
            self._buffer = _host_buffer(nbytes, device, kind)
            self.rows = self._buffer.tensor.view(shape)

    def close(self) -> None:
        """Give the memory back; nothing that uses it may be in flight."""
        self.rows = torch.empty((0, 0, 0), dtype=torch.uint8)
        if self._buffer is not None:
            self._buffer.close()


def host_memory_kind(kind: str, device: torch.device) -> str:
    """What auto means for a GPU's host memory: managed where it can be, else pinned.

    Args:
        kind: auto, managed or pinned.
        device: the GPU.

    Raises:
        ConfigError: managed memory was asked for and can't be, with the reason.
    """
    assert kind in HOST_MEMORY_KINDS, f"no such host memory: {kind}"
    if kind == "pinned":
        return kind
    refusal = managed_refusal(device)
    if refusal is None:
        return "managed"
    if kind == "managed":
        raise ConfigError(f"--host-memory managed: {refusal}; take auto or pinned")
    logger.warning("host memory is pinned, from which rows come half as fast: %s", refusal)
    return "pinned"


def _host_buffer(nbytes: int, device: torch.device, kind: str) -> ManagedBuffer | PinnedBuffer:
    what, flag = "host pool", "--host-pool-gib"
    if host_memory_kind(kind, device) == "pinned":
        return PinnedBuffer(nbytes, what=what, flag=flag)
    return ManagedBuffer(nbytes, what=what, flag=flag, driver=CudaManagedDriver(device))


def _zeros(shape: tuple[int, int, int], device: torch.device, what: str, flag: str) -> Tensor:
    needed = shape[0] * shape[1] * shape[2]
    try:
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        available = torch.cuda.mem_get_info(device)[0]
        raise CapacityError(
            f"the {what} needs {needed / _GIB:.2f} GiB on {device}, {available / _GIB:.2f} GiB are"
            f" free; lower {flag}"
        ) from error
