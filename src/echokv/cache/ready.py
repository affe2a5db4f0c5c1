"""Who leaves each layer next, chosen ahead, and the fused recall that takes them.

Used by `CacheManager` where the backend has such an op. A layer's ready list lies in its
slot_buffer. It is made on a stream of its own as soon as the layer is done with a step, beside the
rest of the model, for the next step: until then every row that this one protects may go.
"""

from itertools import groupby

import torch
from torch import Tensor

from echokv.cache.state import CacheState
from echokv.kernels.fused_layer import FusedLayer
from echokv.kernels.registry import FusedRecall
from echokv.memory.pools import DevicePool, HostPool
from echokv.memory.slots import HostSlots

BESIDE_THE_MODEL = False
"""Whether `end_layer` lists victims; else `begin_step` does so for all layers at once. Beside the
model, one layer's list takes 128 us of the bandwidth that the model needs; all 61 together 448 us
(cuda_cache.json, `step_us`; decode-h200.json)."""


class ReadyLists:
    """The ready lists of every layer.

    Which lists are in order is noted on the CPU when ops are issued; a captured step is issued once
    and found its lists, at every replay, as they were at its capture.

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
        self._totals = totals
        device = state.priority.device
        counters = fused.victim_workspace(state.num_layers, device)
        self._cursors, self._barrier = counters[:-1], counters[-1:]
        self.scratch = torch.empty(state.device_slots, dtype=torch.int32, device=device)
        """[N_G] int32: what the other ops may use as their slot_buffer."""
        self._in_order = [True] * state.num_layers
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._forked = False
        self._choose(slice(None), steps_ahead=1)

    def begin_step(self, layer: int | None) -> None:
        """List who may leave in this step, where that hasn't been done since the list was used."""
        layers = range(self._state.num_layers) if layer is None else [layer]
        for missing, run in groupby(layers, lambda index: not self._in_order[index]):
            if missing:
                indices = list(run)
                self._choose(slice(indices[0], indices[-1] + 1), steps_ahead=0)

    def end_layer(self, layer: int) -> None:
        """List who may leave a layer in the next step, beside whatever the caller does now."""
        if not BESIDE_THE_MODEL:
            return
        layers = slice(layer, layer + 1)
        if self._beside is None:
            self._choose(layers, steps_ahead=1)
            return
        self._beside.wait_stream(torch.cuda.current_stream(self._beside.device))
        self._forked = True
        with torch.cuda.stream(self._beside):
            self._choose(layers, steps_ahead=1)

    def end_step(self) -> None:
        """Let the current stream wait until the lists are made."""
        if self._forked and self._beside is not None:
            torch.cuda.current_stream(self._beside.device).wait_stream(self._beside)
        self._forked = False

    def after_release(self) -> None:
        """Make the lists of all layers anew: the slots that became free go first."""
        self.end_step()
        self._choose(slice(None), steps_ahead=1)

    def _choose(self, layers: slice, *, steps_ahead: int) -> None:
        self._fused.choose_victims(
            self._state.floor,
            self._state.priority[layers],
            self._state.slot_buffer[layers],
            self._cursors[layers],
            self._state.device_slots,
            steps_ahead=steps_ahead,
        )
        self._in_order[layers] = [True] * len(self._in_order[layers])

    def make_resident(self, layer: int, host_slots: HostSlots, scores: Tensor) -> Tensor:
        """[T, k] int32 device slots; what was missing has taken the first names on the list.

        Args:
            layer: decoder layer.
            host_slots: [T, k] int32.
            scores: [T, k] float32.
        """
        device_slots = torch.empty_like(host_slots)
        self._fused.make_resident(host_slots, scores, self.use(layer), device_slots)
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
        self._in_order[index] = False
        state = self._state.layer(index)
        return FusedLayer(
            floor=self._state.floor,
            device_free=state.device_free,
            priority=state.priority,
            device_to_host=state.device_to_host,
            host_to_device=state.host_to_device,
            ready=state.slot_buffer,
            cursor=self._cursors[index : index + 1],
            barrier=self._barrier,
            totals=self._totals[index],
            host_rows=self._host_pool.rows[index],
            device_rows=self._device_pool.rows[index],
            num_ready=self._state.device_slots,
        )
