"""What is predicted about the next step: one k-th score a request and index layer.

State only: `kernels/*/thresholds.py` updates it in the graph, `indexer.prefetch` uses it; shifts
are `indexer.prefill_prefetch`'s. A prediction decides what moves early, never what is attended.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from echokv.kernels.prefetch_args import NO_LIMIT


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Predictions of L index layers for S request slots."""

    thresholds: Tensor  # [L, S] float32: predicted k-th score; +inf: no prediction
    useful: (
        Tensor  # [L, S] float32: rows a step that were absent, named and selected; +inf: unknown
    )
    vain: Tensor  # [L, S] float32: rows a step that were absent, named and not selected; likewise
    limits: Tensor  # [L, S] int32: rows that experience allows, whatever the budget by length
    shifts: Tensor  # [L, S + 1] float32: prefill's predicted k-th score; NaN: none. Last: see below

    @classmethod
    def create(cls, index_layers: int, request_slots: int, device: torch.device) -> "Predictions":
        """No prediction anywhere."""
        shape = (index_layers, request_slots)
        predictions = cls(
            thresholds=torch.empty(shape, dtype=torch.float32, device=device),
            useful=torch.empty(shape, dtype=torch.float32, device=device),
            vain=torch.empty(shape, dtype=torch.float32, device=device),
            limits=torch.empty(shape, dtype=torch.int32, device=device),
            shifts=torch.full((index_layers, request_slots + 1), torch.nan, device=device),
        )
        predictions.forget(range(request_slots))
        return predictions

    def forget(self, request_slots: Iterable[int]) -> None:
        """Start anew for requests that begin to run; doesn't wait for the device.

        A shift begins as the last that any request had: a wrong one can't move a row in vain.
        """
        for slot in request_slots:
            self.shifts[:, slot].copy_(self.shifts[:, -1])
            self.thresholds[:, slot].fill_(torch.inf)
            self.useful[:, slot].fill_(torch.inf)
            self.vain[:, slot].fill_(torch.inf)
            self.limits[:, slot].fill_(NO_LIMIT)
