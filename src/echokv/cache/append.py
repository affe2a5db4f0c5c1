"""How new rows come into the cache: at once, beside other work, or with the next selection.

Used by `CacheManager`, whose order of calls it keeps.
"""

import torch
from torch import Tensor

from echokv.cache.ready import ReadyLists
from echokv.cache.reserve import WRITTEN, Reserver
from echokv.cache.side_stream import SideStream
from echokv.cache.state import CacheState
from echokv.kernels.fused_layer import MOST_NEW_ROWS, TOTALS, NewRows
from echokv.kernels.protocol import Kernels
from echokv.memory.pools import DevicePool, HostPool
from echokv.memory.slots import HostSlots


class Appender:
    """Writes new rows to host and keeps the last of them in the device pool.

    Args:
        kernels: the backend.
        state: of all layers.
        host_pool: where every row goes.
        device_pool: where those that are kept go.
        ready: the lists that a fused append takes names off; None: the backend has no such op.
        slots: finds room for rows, op by op.
        side: where an append may run beside the current stream.
        totals: [L, TOTALS] int64, counted in place.
    """

    def __init__(
        self,
        kernels: Kernels,
        state: CacheState,
        host_pool: HostPool,
        device_pool: DevicePool,
        ready: ReadyLists | None,
        slots: Reserver,
        side: SideStream,
        totals: Tensor,
    ) -> None:
        self._kernels = kernels
        self._state = state
        self._host_pool = host_pool
        self._device_pool = device_pool
        self._ready = ready
        self._slots = slots
        self._side = side
        self._totals = totals
        device = state.priority.device
        self._counts = torch.zeros(TOTALS, dtype=torch.int32, device=device)  # of one call
        self._ignored = torch.zeros(1, dtype=torch.int32, device=device)
        self._put_off: tuple[int, NewRows] | None = None  # of which layer

    def append(
        self,
        layer: int,
        host_slots: HostSlots,
        rows: Tensor,
        *,
        keep: int,
        beside: bool,
        until_selected: bool,
    ) -> None:
        """See `KVCache.append`; what `keep` asks for fits."""
        count = host_slots.shape[0]
        ready = self._ready if keep == count else None
        if ready is not None and until_selected and count <= MOST_NEW_ROWS:
            self.catch_up()
            self._put_off = (layer, NewRows(host_slots, rows))
        elif ready is not None and (beside or until_selected):
            self.catch_up()
            with self._side.fork(host_slots, rows, catches_up=False):
                ready.append(layer, host_slots, rows)
        else:
            self._side.join()
            self.catch_up()
            if ready is not None:
                ready.append(layer, host_slots, rows)
            else:
                self._append_by_ops(layer, host_slots, rows, keep)

    def catch_up(self, *, but: int | None = None) -> None:
        """Append what was put off, unless it is this layer's."""
        if self._put_off is None or self._put_off[0] == but:
            return
        self._side.join()
        (layer, new), self._put_off = self._put_off, None
        assert self._ready is not None, "only ready lists have rows put off"
        self._ready.append(layer, HostSlots(new.host_slots), new.rows)

    def take(self) -> NewRows | None:
        """What was put off, for whoever appends it with the layer's selection."""
        put_off, self._put_off = self._put_off, None
        return None if put_off is None else put_off[1]

    def _append_by_ops(self, layer: int, host_slots: HostSlots, rows: Tensor, keep: int) -> None:
        if keep > 0:
            if self._ready is not None:
                self._ready.forget(layer)
            kept = HostSlots(host_slots[host_slots.shape[0] - keep :])
            priorities = self._state.floor.repeat(keep)
            self._slots.reserve(layer, kept, priorities, self._counts, WRITTEN, self._ignored)
            self._totals[layer].add_(self._counts)
        self._kernels.write_rows(
            rows,
            host_slots,
            self._state.host_to_device[layer],
            self._host_pool.rows[layer],
            self._device_pool.rows[layer],
        )
