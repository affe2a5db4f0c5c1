"""Who leaves each layer next, and the fused recall that takes them.

Used by `CacheManager` where the backend has such an op. A layer's ready list lies in its
slot_buffer and names all slots in the order in which they may leave. It serves step after step:
one launch at the start of a step looks how many names each layer has left, and sorts the slots of
those anew that might run out (`kernels/cuda/claims.cuh` has the reasons why that is exact). It also
evicts the rows that are next to leave, so that a step finds as many slots free as it is likely to
need: whoever takes a free slot need not know what others select.
"""

import torch
from torch import Tensor

from echokv.cache.state import CacheState
from echokv.kernels.fused_layer import CURSOR, STALE, TOUCHED, FusedLayer, FusedLayers, NewRows
from echokv.kernels.protocol import FusedRecall
from echokv.memory.pools import DevicePool, HostPool
from echokv.memory.slots import HostSlots

FREE_SHARE = 32
"""Where one in so many device slots of a layer isn't enough to be free ahead of need, none is:
few free slots don't spare a recall its wait for those that must still be evicted, and each has cost
a row that may be selected."""

PREFETCH_FREE_SHARE = 16
"""At most one in so many is free in a step that prefetches, which in decode takes only these."""


class ReadyLists:
    """The ready lists of every layer.

    Args:
        fused: the backend's op.
        state: whose slot_buffer and priorities it works on.
        host_pool: where every row is.
        device_pool: where selected rows are.
        totals: [L, 5] int64, counted in place.
    """

    def __init__(
        self,
        fused: FusedRecall,
        state: CacheState,
        host_pool: HostPool,
        device_pool: DevicePool,
        totals: Tensor,
    ) -> None:
        self._fused = fused
        self._state = state
        self._host_pool = host_pool
        self._device_pool = device_pool
        device = state.priority.device
        self._cursors = torch.zeros((state.num_layers, CURSOR), dtype=torch.int32, device=device)
        self._barrier = torch.zeros(1, dtype=torch.int32, device=device)
        self._layers = FusedLayers(
            floor=state.floor,
            device_free=state.device_free,
            priority=state.priority,
            device_to_host=state.device_to_host,
            host_to_device=state.host_to_device,
            ready=state.slot_buffer,
            cursor=self._cursors,
            totals=totals,
        )
        self.scratch = torch.empty(state.device_slots, dtype=torch.int32, device=device)
        """[N_G] int32: what the other ops may use as their slot_buffer."""

    def begin_step(self, most_rows: int | None, *, prefetches: bool) -> None:
        """See to it that enough may leave in this step, in every layer, and have some leave.

        Args:
            most_rows: rows that the step can select and write in a layer; None: any number.
            prefetches: whether rows are taken in before they are selected.
        """
        slots = self._state.device_slots
        # What is taken in, and what is on the list but turns out to be selected: no more than that.
        most_names = slots if most_rows is None else max(1, min(slots, most_rows))
        most_free = slots // (PREFETCH_FREE_SHARE if prefetches else FREE_SHARE)
        self._fused.choose_victims(self._layers, most_names, most_free, partly=prefetches)

    def forget(self, layer: int | None = None) -> None:
        """Have a list made anew for the next step: other ops have freed slots, or used some.

        Args:
            layer: which; None: all.
        """
        layers = slice(None) if layer is None else slice(layer, layer + 1)
        self._cursors[layers, TOUCHED] = STALE

    def make_resident(
        self,
        layer: int,
        host_slots: HostSlots,
        scores: Tensor,
        *,
        new_rows: NewRows | None = None,
        beside: bool = False,
    ) -> Tensor:
        """[T, k] int32 device slots; what was missing has taken the first names on the list.

        Args:
            layer: decoder layer.
            host_slots: [T, k] int32.
            scores: [T, k] float32.
            new_rows: of this layer, appended first; at most MOST_NEW_ROWS.
            beside: other kernels run at the same time.
        """
        device_slots = torch.empty_like(host_slots)
        self._fused.make_resident(
            host_slots, scores, self.use(layer), device_slots, new_rows=new_rows, beside=beside
        )
        return device_slots

    def append(self, layer: int, host_slots: HostSlots, rows: Tensor) -> None:
        """Write new rows to host, and make all of them resident.

        Args:
            layer: decoder layer.
            host_slots: [T] int32.
            rows: [T, row_bytes] uint8.
        """
        self._fused.append_rows(host_slots, rows, self.use(layer))

    def use(self, index: int) -> FusedLayer:
        """A layer as ops take it that take names off its list."""
        state = self._state.layer(index)
        return FusedLayer(
            floor=self._state.floor,
            device_free=state.device_free,
            priority=state.priority,
            device_to_host=state.device_to_host,
            host_to_device=state.host_to_device,
            ready=state.slot_buffer,
            cursor=self._cursors[index],
            barrier=self._barrier,
            totals=self._layers.totals[index],
            host_rows=self._host_pool.rows[index],
            device_rows=self._device_pool.rows[index],
        )
