"""Rows of a selection that the device pool can't hold together, in a tensor of their own.

Used by `CacheManager` for prefill passes; the pool is read and stays as it is.
"""

import torch
from torch import Tensor

from echokv.cache.state import CacheState
from echokv.kernels.protocol import Kernels
from echokv.memory.pools import DevicePool, HostPool
from echokv.memory.slots import DeviceSlots, HostSlots


class StagedRows:
    """Copies rows out of both pools. Nothing waits for the device.

    Args:
        kernels: the backend, of which `recall` copies.
        state: which rows are in the device pool.
        host_pool: where every row is.
        device_pool: where some are.
    """

    def __init__(
        self, kernels: Kernels, state: CacheState, host_pool: HostPool, device_pool: DevicePool
    ) -> None:
        self._kernels = kernels
        self._state = state
        self._host_pool = host_pool
        self._device_pool = device_pool
        device = state.priority.device
        self.totals = torch.zeros((state.num_layers, 2), dtype=torch.int64, device=device)
        """[L, 2] int64: distinct rows found in the device pool, less those that were selected in
        this step before, and rows fetched from host."""

    def stage(
        self, layer: int, host_slots: HostSlots, most_rows: int
    ) -> tuple[Tensor, DeviceSlots]:
        """Every selected row once, in the order of host slots, and where each entry's is.

        Args:
            layer: decoder layer.
            host_slots: [T, k] int32, -1 for none.
            most_rows: rows of the result; at least as many as are distinct in host_slots.

        Returns:
            [most_rows, row_bytes] uint8, and [T, k] int32, -1 exactly where host_slots is.
        """
        device_rows, host_rows = self._device_pool.rows[layer], self._host_pool.rows[layer]
        state = self._state.layer(layer)
        where = state.host_to_device
        wanted = torch.zeros(where.shape[0] + 1, dtype=torch.bool, device=where.device)
        entries = host_slots.flatten().long()
        wanted.index_fill_(0, entries, True)  # -1 wraps to the spare entry
        wanted[-1] = False
        places = torch.where(wanted, wanted.cumsum(0, dtype=torch.int32) - 1, -1)
        rows = device_rows.new_empty((most_rows, device_rows.shape[1]))
        resident = where >= 0
        slots, targets, found = _listed(wanted[:-1] & resident, places, most_rows)
        sources = where[slots.long()]
        self._kernels.recall(sources, found, targets, device_rows, rows)
        ranked = state.priority[sources.clamp(min=0).long()] > self._state.floor
        again = (ranked & (targets >= 0)).sum()
        slots, targets, absent = _listed(wanted[:-1] & ~resident, places, most_rows)
        self._kernels.recall(slots, absent, targets, host_rows, rows)
        self.totals[layer] += torch.cat([found - again, absent])
        return rows, DeviceSlots(places[entries].view(host_slots.shape))


def _listed(chosen: Tensor, places: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Those of chosen [N] bool as a list, and their places.

    Returns:
        [most] int32 chosen ones in order, then zeros; [most] int32 their places, then -1; [1] int32
        how many.
    """
    counted = chosen.cumsum(0, dtype=torch.int32)
    at = torch.where(chosen, counted - 1, most).long()
    slots = torch.arange(chosen.shape[0], dtype=torch.int32, device=chosen.device)
    listed, targets = slots.new_zeros(most + 1), slots.new_full((most + 1,), -1)
    listed.scatter_(0, at, slots)
    targets.scatter_(0, at, places[:-1])
    return listed[:most], targets[:most], counted[-1:]
