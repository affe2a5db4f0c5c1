"""How long a selected row should stay: eviction priorities.

Knows the clock and the index scores of one selection; the ops take the lowest priority first.
"""

from typing import Protocol

import torch
from torch import Tensor

from echokv.kernels.protocol import Kernels
from echokv.memory.slots import HostSlots


class EvictionPolicy(Protocol):
    """Gives every selected row a priority within the current step's range."""

    def priorities(self, clock: Tensor, scores: Tensor, host_slots: HostSlots) -> Tensor:
        """Priorities of one selection.

        Args:
            clock: [1] int32, the current step.
            scores: [T, k] float32 index scores; whatever where host_slots is -1.
            host_slots: [T, k] int32, -1 for none.

        Returns:
            [T, k] int32 in [clock << 3, (clock << 3) + 7]; above clock << 3, the priority of rows
            that are only written in this step, wherever host_slots is not -1.
        """
        ...


class RecencyThenScore:
    """Least recently selected goes first; within a step the lowest index score (paper, 4.2).

    The low three bits are 1 to 7: where the score lies between the lowest and the highest of its
    row. Rows of different requests are compared by that place, not by their scores, which have no
    common scale.

    Args:
        kernels: the backend.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def priorities(self, clock: Tensor, scores: Tensor, host_slots: HostSlots) -> Tensor:
        """See `EvictionPolicy`."""
        priorities = torch.empty_like(host_slots)
        self._kernels.score_priorities(clock, scores, host_slots, priorities)
        return priorities
