"""What prefetching has to itself: scratch that no op of the main stream uses, and its counters."""

import torch
from torch import Tensor

from echokv.cache.reserve import Reserver
from echokv.cache.side_stream import SideStream
from echokv.cache.state import CacheState
from echokv.kernels.cache_args import WORKSPACE_INTS
from echokv.kernels.fused_layer import TOTALS
from echokv.kernels.protocol import Kernels


class PrefetchedRows:
    """Scratch and counters.

    Args:
        kernels: the backend.
        state: the cache's.
        side: where prefetches run.
    """

    def __init__(self, kernels: Kernels, state: CacheState, side: SideStream) -> None:
        self._kernels = kernels
        self._state = state
        self._side = side
        device, layers = state.priority.device, state.num_layers
        slot_buffer = torch.empty(state.device_slots, dtype=torch.int32, device=device)
        workspace = torch.zeros(WORKSPACE_INTS, dtype=torch.int32, device=device)
        self.slots = Reserver(kernels, state, slot_buffer, workspace)
        self.unranked = torch.full((state.device_slots,), -1, dtype=torch.int32, device=device)
        """[N_G] int32: priorities that raise nobody's."""
        self.counts = torch.zeros(TOTALS, dtype=torch.int32, device=device)
        self.num_hits = torch.zeros(1, dtype=torch.int32, device=device)
        self.totals = torch.zeros((layers, TOTALS), dtype=torch.int64, device=device)
        self.useful = torch.zeros(layers, dtype=torch.int64, device=device)
        self._every = torch.arange(layers, dtype=torch.int32, device=device)

    def note(self, layer: int, host_slots: Tensor) -> None:
        """Count what `counts` says was just fetched, and how much of it is selected, when known.

        Args:
            layer: decoder layer.
            host_slots: [M] int32, distinct; negative for none.
        """
        self._side.later(lambda: self._settle(layer, host_slots))

    def _settle(self, layer: int, host_slots: Tensor) -> None:
        """After the layer's `make_resident`, before the next prefetch and before the step ends."""
        self.totals[layer].add_(self.counts)
        self.count_useful(self._every[layer : layer + 1], host_slots[None])

    def count_useful(self, layers: Tensor, host_slots: Tensor) -> None:
        """Count the rows that were selected among what was fetched in this step.

        Args:
            layers: [N] int32, decoder layers, all of whose selections are resident.
            host_slots: [N, M] int32, distinct within a row; negative for none.
        """
        state = self._state
        self._kernels.count_useful(
            host_slots, layers, state.floor, state.host_to_device, state.priority, self.useful
        )
