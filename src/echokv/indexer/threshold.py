"""What is predicted about the next decode step: one k-th score a request and index layer.

State only: `kernels/*/thresholds.py` updates it in the graph, `indexer.prefetch` uses it. A
prediction decides what moves early, never what is attended.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Predictions of L index layers for S request slots."""

    thresholds: Tensor  # [L, S] float32: predicted k-th score; +inf: no prediction
    usefulness: Tensor  # [L, S] float32 in [0, 1]: share of candidates that were selected
    enabled: Tensor  # [L, S] int32: 0 where predictions were too poor to act on

    @classmethod
    def create(cls, index_layers: int, request_slots: int, device: torch.device) -> "Predictions":
        """No prediction anywhere."""
        shape = (index_layers, request_slots)
        predictions = cls(
            thresholds=torch.empty(shape, dtype=torch.float32, device=device),
            usefulness=torch.empty(shape, dtype=torch.float32, device=device),
            enabled=torch.empty(shape, dtype=torch.int32, device=device),
        )
        predictions.forget(range(request_slots))
        return predictions

    def forget(self, request_slots: Iterable[int]) -> None:
        """Start anew for requests that begin to run; doesn't wait for the device."""
        for slot in request_slots:
            self.thresholds[:, slot].fill_(torch.inf)
            self.usefulness[:, slot].fill_(1.0)
            self.enabled[:, slot].fill_(1)
