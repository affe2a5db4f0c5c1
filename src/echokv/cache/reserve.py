"""Device slots for rows that have none, op by op: lookup, free and allocate in sequence.

Used by `CacheManager` for whatever a backend's fused recall doesn't do. Knows nothing of rows.
"""

import torch
from torch import Tensor

from echokv.cache.state import CacheState
from echokv.kernels.protocol import Kernels
from echokv.memory.slots import HostSlots

HITS, RECALLED, EVICTED, WRITTEN, ALLOCATED = range(5)
"""Columns of every counter: distinct rows that were selected and found, fetched from host, evicted,
written anew, and given a device slot."""


class Reserver:
    """The three ops over one stream's scratch.

    Args:
        kernels: the backend.
        state: the cache's, changed in place.
        slot_buffer: [N_G] int32; None: each layer's own, in the state.
        workspace: [WORKSPACE_INTS] int32 scratch of the ops.
    """

    def __init__(
        self, kernels: Kernels, state: CacheState, slot_buffer: Tensor | None, workspace: Tensor
    ) -> None:
        self._kernels = kernels
        self._state = state
        self._slot_buffer = slot_buffer
        self._workspace = workspace

    def slot_buffer(self, layer: int) -> Tensor:
        """[N_G] int32: begins with the device slots of what the layer's last call found absent."""
        if self._slot_buffer is not None:
            return self._slot_buffer
        return self._state.slot_buffer[layer]

    def reserve(
        self,
        layer: int,
        host_slots: HostSlots,
        priorities: Tensor,
        counts: Tensor,
        missing_column: int,
        num_hits: Tensor,
    ) -> Tensor:
        """Protect what is resident and give device slots to what is not, evicting as needed.

        Args:
            layer: decoder layer.
            host_slots: [M] int32, -1 for none; duplicates allowed.
            priorities: [M] int32, what a resident one's priority is raised to.
            counts: [TOTALS] int32 out: evicted, allocated, and in missing_column the absent ones.
            missing_column: RECALLED or WRITTEN.
            num_hits: [1] int32 out, see `lookup`.

        Returns:
            the absent host slots, then -1; no longer than the device pool.
        """
        state, floor = self._state.layer(layer), self._state.floor
        mappings = (state.device_free, state.priority, state.device_to_host, state.host_to_device)
        missing = torch.empty_like(host_slots)
        num_missing = counts[missing_column : missing_column + 1]
        self._kernels.lookup(
            host_slots,
            priorities,
            floor,
            state.host_to_device,
            state.priority,
            missing,
            num_missing,
            num_hits,
            self._workspace,
        )
        missing = missing[: self._state.device_slots]  # more distinct rows than that were refused
        scratch = (*mappings, self.slot_buffer(layer))
        evicted, allocated = (counts[at : at + 1] for at in (EVICTED, ALLOCATED))
        self._kernels.free(num_missing, floor, *scratch, evicted, self._workspace)
        self._kernels.allocate(missing, num_missing, floor, *scratch, allocated, self._workspace)
        return missing
