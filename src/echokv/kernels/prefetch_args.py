"""What the prefetch ops of every backend share: constants, arguments and their checks, findings.

Knows no backend. A request slot is a running request's number, below --max-num-seqs; the state of
one index layer is three tensors with an entry for each.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from echokv.kernels.checks import check_tensor
from echokv.kernels.fused_layer import FusedLayer

EMA_ALPHA = 0.5
"""Weight of the past in the predicted k-th score (ECHO paper, section 5.1)."""

USEFUL_ALPHA = 0.5
"""Weight of the past in the numbers of useful rows, and of rows in vain."""

ROWS_FOR_A_USEFUL_ONE = 4
"""Rows that a request may fetch in a layer for each that was useful of late, where more come in
vain than are useful. So what it gets dwindles to PROBES where fewer than one in four is useful.
Where no more come in vain there is NO_LIMIT: rows are missing in bursts, and an average of steps
with few would hold back those with many.
"""

PROBES = 8
"""Rows that it may fetch at least, to see whether things have changed."""

RESTS = 7
"""Steps in which a request fetches nothing, and looks for nothing, when it has come down to PROBES;
a limit below zero says how many are left. Then it looks again, in one step."""

NO_LIMIT = 1 << 30
"""The limit of a request that nothing is known about."""

FUSED_HEAD_DIM, FUSED_HEADS = 128, (32, 64)
"""Dimensions of a key, and heads of a query, for which rows can move while scores are made: the
CUDA kernels' of fp8 keys."""

BUDGET_UNIT = 1 << 16
"""Tokens of context that a budget's `rows_per_unit` is for."""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """What a prefetch of T rows finds."""

    host_slots: Tensor  # [T, most] int32: distinct ones that were fetched; negative elsewhere
    scores: Tensor  # [T, most] float32: of the candidates, fetched or not; -inf past them
    counts: Tensor  # [T] int32: candidates

    @classmethod
    def room(cls, rows: int, most: int, device: torch.device) -> "Candidates":
        """For some; who fills it empties it first."""
        return cls(
            host_slots=torch.empty((rows, most), dtype=torch.int32, device=device),
            scores=torch.empty((rows, most), dtype=torch.float32, device=device),
            counts=torch.empty(rows, dtype=torch.int32, device=device),
        )

    def rows(self, start: int, end: int) -> "Candidates":
        """Those of some rows, in place."""
        return Candidates(
            host_slots=self.host_slots[start:end],
            scores=self.scores[start:end],
            counts=self.counts[start:end],
        )


@dataclass(frozen=True, kw_only=True)
class CandidateLists:
    """What blocks that score list for those that fetch; launches use them one after the other."""

    entries: Tensor  # [blocks, lists, entries, 4] int32; see Listed in kernels/cuda/prefetch.cuh
    epoch: Tensor  # [1] int32, raised before each launch: entries of any other are stale


@dataclass(frozen=True, kw_only=True)
class LayerPrefetch:
    """The prefetch of one layer for T rows of a pass: what it goes by, and what it writes.

    S request slots. `kernels/cuda/index_scores.py` says what is done with it. The layer's totals
    count prefetched rows as recalled and allocated, and who left. Its rows are whole, aligned
    sixteen-byte words; its pool must have room for T * most rows beside what else is protected in
    this step.
    """

    layer: FusedLayer  # in place
    request_slots: Tensor  # [T] int32: each row's entry of thresholds and limits; -1 for none
    thresholds: Tensor  # [S] float32: predicted k-th scores; +inf and NaN: no prediction
    limits: Tensor  # [S] int32: most rows of each, whatever its budget by length
    lists: CandidateLists  # in place; of no other launch that may run at the same time
    found: Candidates  # out: complete when the work on the fork is; its columns are `most`
    kth_scores: Tensor  # [T] float32 out: a NaN that no score is, for the top-k to overwrite
    rows_per_unit: int  # of the budget, for each BUDGET_UNIT tokens of context
    least: int  # of the budget, whatever the context

    def check(self, rows: int, device: torch.device) -> None:
        """Check the layer, and the tensors of a pass of so many rows.

        Raises:
            ValueError: with the tensor's name, what it is and what it must be.
        """
        self.layer.check()
        host_slots, slots = self.found.host_slots, self.thresholds.shape[:1]
        most = host_slots.shape[1]
        check_tensor("request_slots", self.request_slots, (rows,), torch.int32, device=device)
        check_tensor("thresholds", self.thresholds, (None,), torch.float32, device=device)
        check_tensor("limits", self.limits, slots, torch.int32, device=device)
        check_tensor("found.host_slots", host_slots, (rows, most), torch.int32, device=device)
        check_tensor("kth_scores", self.kth_scores, (rows,), torch.float32, device=device)
        if most < 1:
            raise ValueError(f"found must have at least 1 column, got {most}")


def row_budget(
    context_len: int, most: int, rows_per_unit: int, least: int, limit: int = NO_LIMIT
) -> int:
    """Rows that one request may prefetch in one layer and step: by its context and experience."""
    return max(0, min(most, least + context_len * rows_per_unit // BUDGET_UNIT, limit))


def check_candidates_args(
    scores: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    request_rows: Tensor,
    request_slots: Tensor,
    thresholds: Tensor,
    limits: Tensor,
    host_to_device: Tensor,
    most: int,
) -> None:
    """Raise ValueError unless `prefetch_candidates` can take these."""
    device = scores.device
    check_tensor("scores", scores, (None, None), torch.float32)
    rows = scores.shape[0]
    for name, tensor in (
        ("context_lens", context_lens),
        ("request_rows", request_rows),
        ("request_slots", request_slots),
    ):
        check_tensor(name, tensor, (rows,), torch.int32, device=device)
    check_tensor("block_tables", block_tables, (None, None), torch.int32, device=device)
    check_tensor("thresholds", thresholds, (None,), torch.float32, device=device)
    check_tensor("limits", limits, (thresholds.shape[0],), torch.int32, device=device)
    check_tensor("host_to_device", host_to_device, (None,), torch.int32, device=device)
    if most < 1:
        raise ValueError(f"most must be at least 1, got {most}")


def check_learn_args(
    request_slots: Tensor,
    kth_scores: Tensor,
    candidate_scores: Tensor,
    num_candidates: Tensor,
    thresholds: Tensor,
    useful: Tensor,
    vain: Tensor,
    limits: Tensor,
) -> None:
    """Raise ValueError unless `update_thresholds` can take these."""
    device = thresholds.device
    check_tensor("request_slots", request_slots, (None,), torch.int32, device=device)
    rows = request_slots.shape[0]
    check_tensor("kth_scores", kth_scores, (rows,), torch.float32, device=device)
    check_tensor("candidate_scores", candidate_scores, (rows, None), torch.float32, device=device)
    check_tensor("num_candidates", num_candidates, (rows,), torch.int32, device=device)
    check_tensor("thresholds", thresholds, (None,), torch.float32)
    slots = thresholds.shape[0]
    check_tensor("useful", useful, (slots,), torch.float32, device=device)
    check_tensor("vain", vain, (slots,), torch.float32, device=device)
    check_tensor("limits", limits, (slots,), torch.int32, device=device)


def check_useful_args(
    host_slots: Tensor,
    layers: Tensor,
    floor: Tensor,
    host_to_device: Tensor,
    priority: Tensor,
    totals: Tensor,
) -> None:
    """Raise ValueError unless `count_useful` can take these."""
    device = priority.device
    check_tensor("host_slots", host_slots, (None, None), torch.int32, device=device)
    check_tensor("layers", layers, (host_slots.shape[0],), torch.int32, device=device)
    check_tensor("floor", floor, (1,), torch.int32, device=device)
    check_tensor("priority", priority, (None, None), torch.int32)
    num_layers = priority.shape[0]
    check_tensor("host_to_device", host_to_device, (num_layers, None), torch.int32, device=device)
    check_tensor("totals", totals, (num_layers,), torch.int64, device=device)
