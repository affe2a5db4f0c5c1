"""The three pools of bytes: host rows, device rows, index-key pages.

Know sizes and where the memory is; what the bytes mean is `memory.formats` and the kernels.
"""

import torch
from torch import Tensor

from echokv.errors import CapacityError
from echokv.memory.host_memory import require_host_bytes
from echokv.memory.pinned import PinnedBuffer, Registrar
from echokv.memory.slots import BLOCK_TOKENS

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
        device: the device that uses it; plain memory for a CPU, registered memory for a GPU.
        registrar: stands in for CUDA's registration in tests.
        memory: [bytes] uint8, registered memory to lie in, which outlives the pool; None: its own.

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
        registrar: Registrar | None = None,
        memory: Tensor | None = None,
    ) -> None:
        assert num_slots % BLOCK_TOKENS == 0, f"{num_slots} host slots are not whole blocks"
        self.num_slots = num_slots
        shape = (num_layers, num_slots, row_bytes)
        nbytes = num_layers * num_slots * row_bytes
        self._buffer: PinnedBuffer | None = None
        if memory is not None:
            assert memory.numel() >= nbytes, f"{memory.numel()} bytes don't hold {nbytes}"
            self.rows = memory[:nbytes].view(shape)
        elif device.type == "cpu" and registrar is None:
            require_host_bytes(nbytes, what="host pool", flag="--host-pool-gib")
            self.rows = torch.zeros(shape, dtype=torch.uint8)
        else:
            self._buffer = PinnedBuffer(
                nbytes, what="host pool", flag="--host-pool-gib", registrar=registrar
            )
            self.rows = self._buffer.tensor.view(shape)

    def close(self) -> None:
        """Give the memory back; nothing that uses it may be in flight."""
        self.rows = torch.empty((0, 0, 0), dtype=torch.uint8)
        if self._buffer is not None:
            self._buffer.close()


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
