"""Who leaves each layer next, chosen ahead, and the fused recall that takes them.

Used by `CacheManager` where the backend has such an op. A layer's ready list lies in its
slot_buffer; it is made anew for each cache step, so that what one step protected may go in the
next.
"""

import torch
from torch import Tensor

from echokv.cache.state import CacheState
from echokv.kernels.registry import FusedRecall
from echokv.memory.slots import HostSlots


class ReadyLists:
    """The ready lists of every layer.

    Args:
        fused: the backend's op.
        state: whose slot_buffer and priorities it works on.
    """

    def __init__(self, fused: FusedRecall, state: CacheState) -> None:
        self._fused = fused
        self._state = state
        device = state.priority.device
        counters = fused.victim_workspace(state.num_layers, device)
        self._cursors, self._barrier = counters[:-1], counters[-1:]
        self.scratch = torch.empty(state.device_slots, dtype=torch.int32, device=device)
        """[N_G] int32: what the other ops may use as their slot_buffer."""

    def choose(self, layer: int | None) -> None:
        """List who may leave, oldest first: in one layer, or in all of them."""
        layers = slice(None) if layer is None else slice(layer, layer + 1)
        self._fused.choose_victims(
            self._state.floor,
            self._state.priority[layers],
            self._state.slot_buffer[layers],
            self._cursors[layers],
            self._state.device_slots,
        )

    def make_resident(
        self,
        layer: int,
        host_slots: HostSlots,
        scores: Tensor,
        totals: Tensor,
        host_rows: Tensor,
        device_rows: Tensor,
    ) -> Tensor:
        """[T, k] int32 device slots; what was missing has taken the first names on the list.

        Args:
            layer: decoder layer.
            host_slots: [T, k] int32.
            scores: [T, k] float32.
            totals: [5] int64, the layer's, in place.
            host_rows: [N_H, row_bytes] uint8, the layer's.
            device_rows: [N_G, row_bytes] uint8, the layer's.
        """
        device_slots = torch.empty_like(host_slots)
        self._fused.make_resident(
            host_slots,
            scores,
            *self._layer(layer),
            totals,
            host_rows,
            device_rows,
            device_slots,
            num_ready=self._state.device_slots,
        )
        return device_slots

    def append(
        self,
        layer: int,
        host_slots: HostSlots,
        rows: Tensor,
        totals: Tensor,
        host_rows: Tensor,
        device_rows: Tensor,
    ) -> None:
        """Write new rows to host, and make all of them resident.

        Args:
            layer: decoder layer.
            host_slots: [T] int32.
            rows: [T, row_bytes] uint8.
            totals: [5] int64, the layer's, in place.
            host_rows: [N_H, row_bytes] uint8, the layer's.
            device_rows: [N_G, row_bytes] uint8, the layer's.
        """
        self._fused.append_rows(
            host_slots,
            rows,
            *self._layer(layer),
            totals,
            host_rows,
            device_rows,
            num_ready=self._state.device_slots,
        )

    def _layer(
        self, index: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What both ops take of a layer's state, in their order."""
        state = self._state.layer(index)
        return (
            self._state.floor,
            state.device_free,
            state.priority,
            state.device_to_host,
            state.host_to_device,
            state.slot_buffer,
            self._cursors[index : index + 1],
            self._barrier,
        )
