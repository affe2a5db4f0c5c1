"""The KV cache without offloading: every row in HBM, a device slot is its host slot.

There is no host pool, nothing is recalled or evicted, and no rates are counted.
"""

import torch
from torch import Tensor

from echokv.cache.protocol import LayerCounters
from echokv.cache.state import CacheInvariantError
from echokv.kernels.protocol import Kernels
from echokv.memory.pools import DevicePool
from echokv.memory.slots import NO_SLOT, DeviceSlots, HostSlots


class ResidentCache:
    """A `KVCache` that holds everything in HBM (--no-offload).

    Args:
        kernels: the backend.
        device_pool: as many slots a layer as there are host slots.
    """

    def __init__(self, kernels: Kernels, device_pool: DevicePool) -> None:
        self._kernels = kernels
        self._device_pool = device_pool
        self._layers, self._slots, _ = device_pool.rows.shape
        device = device_pool.rows.device
        self._written = torch.zeros(self._slots + 1, dtype=torch.bool, device=device)
        self._nowhere = torch.full((self._slots,), NO_SLOT, dtype=torch.int32, device=device)

    @property
    def capacity(self) -> int:
        """Device slots a layer."""
        return self._slots

    @property
    def host_slots(self) -> int:
        """See `KVCache`: as many as there are device slots."""
        return self._slots

    @property
    def recalls(self) -> bool:
        """See `KVCache`: nothing is ever absent."""
        return False

    @property
    def metadata_bytes(self) -> int:
        """See `KVCache`; 5 bytes a slot."""
        return 4 * self._nowhere.numel() + self._slots

    def begin_step(self, *, most_rows: int | None = None, prefetches: bool = False) -> None:
        """Nothing is protected, so nothing changes."""

    def end_step(self) -> None:
        """Nothing runs beside the current stream."""

    def append(
        self,
        layer: int,
        host_slots: HostSlots,
        rows: Tensor,
        *,
        keep: int,
        beside: bool = False,
        until_selected: bool = False,
    ) -> None:
        """Write new rows, at once; all of them stay, whatever `keep` says."""
        pool = self._device_pool.rows[layer]
        # The device pool stands where the op expects the host pool, so that it is written once.
        self._kernels.write_rows(rows, host_slots, self._nowhere, pool, pool)
        if layer == 0:
            self._written.index_fill_(0, host_slots.long(), True)  # -1 wraps to the spare entry

    def make_resident(
        self,
        layer: int,
        host_slots: HostSlots,
        scores: Tensor,
        *,
        max_distinct: int | None = None,
    ) -> DeviceSlots:
        """The same numbers: every row is where its address says."""
        return DeviceSlots(host_slots)

    def recall_ahead(
        self,
        layer: int,
        host_slots: HostSlots,
        scores: Tensor,
        *,
        max_distinct: int | None = None,
    ) -> DeviceSlots:
        """The same numbers, at once."""
        return DeviceSlots(host_slots)

    def wait(self) -> None:
        """Nothing runs beside the current stream."""

    def settle(self, layer: int) -> None:
        """See `KVCache`: nothing is counted late."""

    def stage(
        self, layer: int, host_slots: HostSlots, *, most_rows: int
    ) -> tuple[Tensor, DeviceSlots]:
        """Every row is in the pool already: the pool itself."""
        return self.rows(layer), DeviceSlots(host_slots)

    def rows(self, layer: int) -> Tensor:
        """See `KVCache`."""
        return self._device_pool.rows[layer]

    def release(self, host_slots: Tensor) -> None:
        """See `KVCache`."""
        self._written.index_fill_(0, host_slots.to(self._written.device).long(), False)

    def counters(self) -> list[LayerCounters]:
        """Resident rows; selections are not counted, as none can miss."""
        resident = int(self._written[:-1].sum())
        nothing = LayerCounters(
            selected=0, recalled=0, evicted=0, prefetched=0, useful=0, resident=resident
        )
        return [nothing] * self._layers

    def live_rows(self, live_host_slots: Tensor) -> int:
        """See `KVCache`."""
        written = self._written[:-1]
        return int((written & live_host_slots.to(written.device)).sum())

    def check(self, live_host_slots: Tensor | None = None) -> None:
        """Verify that every written row belongs to a live host slot, when those are given."""
        if live_host_slots is None:
            return
        written = self._written[:-1]
        stale = (written & ~live_host_slots.to(written.device)).nonzero().squeeze(1)
        if stale.shape[0]:
            raise CacheInvariantError(
                f"{stale.shape[0]} written rows belong to no live host slot: {stale[:8].tolist()}"
            )
