"""What prefetching has to itself: scratch that no op of the main stream uses, and its counters.

Knows which rows the latest prefetch brought until it is known which of them were selected.
"""

import torch
from torch import Tensor

from echokv.cache.state import CacheState
from echokv.kernels.cache_args import WORKSPACE_INTS
from echokv.kernels.registry import Kernels
from echokv.memory.slots import HostSlots


class PrefetchedRows:
    """Scratch, counters and the latest prefetch.

    Args:
        kernels: the backend.
        state: the cache's.
        columns: of the counters of one call.
    """

    def __init__(self, kernels: Kernels, state: CacheState, columns: int) -> None:
        self._kernels = kernels
        self._state = state
        device, layers = state.priority.device, state.num_layers
        self.slot_buffer = torch.empty(state.device_slots, dtype=torch.int32, device=device)
        self.workspace = torch.zeros(WORKSPACE_INTS, dtype=torch.int32, device=device)
        self.unranked = torch.full((state.device_slots,), -1, dtype=torch.int32, device=device)
        """[N_G] int32: priorities that raise nobody's."""
        self._counts = torch.zeros((2, columns), dtype=torch.int32, device=device)
        self.num_hits = torch.zeros(1, dtype=torch.int32, device=device)
        self.totals = torch.zeros((layers, columns), dtype=torch.int64, device=device)
        self.useful = torch.zeros(layers, dtype=torch.int64, device=device)
        self._turn = 0
        self._latest: tuple[int, Tensor, Tensor | None] | None = None

    @property
    def counts(self) -> Tensor:
        """[columns] int32: what the ops of the prefetch to come count; not those of the latest."""
        return self._counts[self._turn]

    def note(self, layer: int, host_slots: Tensor, *, counted: bool) -> None:
        """Remember what was just fetched, and settle the prefetch before it.

        Args:
            layer: decoder layer.
            host_slots: [M] int32, distinct; negative for none.
            counted: whether the totals have it already; else `counts` has.
        """
        self.settle()
        self._latest = layer, host_slots, None if counted else self.counts
        self._turn = 1 - self._turn

    def settle(self) -> None:
        """Take over the counts of the latest prefetch, and how many of its rows were selected.

        After the layer's `make_resident`, and before the step ends.
        """
        if self._latest is None:
            return
        layer, host_slots, counts = self._latest
        self._latest = None
        if counts is not None:
            self.totals[layer].add_(counts)
        self._kernels.count_useful(
            HostSlots(host_slots),
            self._state.floor,
            self._state.host_to_device[layer],
            self._state.priority[layer],
            self.useful[layer : layer + 1],
        )
