"""What a prefetch may have done to a layer, checked against plain Python.

Which candidates are found first is free, and so is which of them are forgotten in a hurry. All else
must be exact: only candidates move, no row has more than its budget, shared rows move once, nobody
protected leaves, and the layer's state is what those rows in those slots come to.
"""

import random
from collections import Counter

import torch
from tests.kernels.cache_model import LayerModel, layer_in_use
from tests.kernels.resident_model import LayerUnderTest
from torch import Tensor

from echokv.kernels.fused_layer import TAKEN, FusedLayer
from echokv.kernels.prefetch_args import NO_LIMIT, CandidateLists, Candidates, LayerPrefetch

BUDGET_UNIT = 65536


class PrefetchCase:
    """Requests with scores and predictions over a layer of the cache.

    Args:
        under_test: the layer, whose ready list has been made.
        lens: of each row's context.
        tables: [R, B] int32 block ids; requests may share blocks.
        request_rows: of each row.
        rng: for predictions.
    """

    def __init__(
        self,
        under_test: LayerUnderTest,
        lens: list[int],
        tables: Tensor,
        request_rows: list[int],
        rng: random.Random,
    ) -> None:
        self.layer, self.lens, self.tables = under_test, lens, tables
        self.request_rows = request_rows
        rows = len(lens)
        self.width = max(64, -(-max(lens) // 64) * 64)
        self.scores = torch.randn(rows, self.width)
        for row, length in enumerate(lens):
            self.scores[row, length:] = rng.choice([-torch.inf, torch.nan, torch.inf])
        self.request_slots = rng.sample(range(rows + 2), rows)
        self.thresholds = torch.full((rows + 2,), 0.5)
        self.limits = torch.full((rows + 2,), NO_LIMIT, dtype=torch.int32)

    def fused_layer(self, floor: int) -> FusedLayer:
        """The tensors as the op takes them."""
        tensors, layer = self.layer.tensors, self.layer
        return FusedLayer(
            floor=torch.tensor([floor], dtype=torch.int32, device=layer.device),
            device_free=tensors.device_free, priority=tensors.priority,
            device_to_host=tensors.device_to_host, host_to_device=tensors.host_to_device,
            ready=tensors.slot_buffer, cursor=layer.cursor,
            barrier=layer.barrier, totals=layer.totals.zero_(),
            host_rows=layer.host_rows, device_rows=layer.device_rows,
        )  # fmt: skip

    def prefetch(
        self, floor: int, lists: CandidateLists, *, most: int, rows_per_unit: int, least: int
    ) -> LayerPrefetch:
        """What the op takes, with room for what it finds."""
        rows, device = len(self.lens), self.layer.device
        return LayerPrefetch(
            layer=self.fused_layer(floor), request_slots=ints(self.request_slots).to(device),
            thresholds=self.thresholds.to(device), limits=self.limits.to(device), lists=lists,
            found=Candidates.room(rows, most, device), kth_scores=torch.empty(rows, device=device),
            rows_per_unit=rows_per_unit, least=least,
        )  # fmt: skip

    def candidates(self, row: int) -> dict[int, float]:
        """Host slot -> score of everything in a row that beats its prediction."""
        slot = self.request_slots[row]
        threshold = float(self.thresholds[slot]) if slot >= 0 else torch.inf
        if not threshold < torch.inf:
            return {}
        table = self.tables[self.request_rows[row]].tolist()
        scores = self.scores[row, : self.lens[row]].tolist()
        return {
            table[at // 64] * 64 + at % 64: score
            for at, score in enumerate(scores)
            if score >= threshold
        }

    def budget(self, row: int, prefetch: LayerPrefetch) -> int:
        """Candidates that a row may have."""
        limit, most = int(self.limits[self.request_slots[row]]), prefetch.found.host_slots.shape[1]
        by_length = prefetch.least + self.lens[row] * prefetch.rows_per_unit // BUDGET_UNIT
        return max(0, min(most, by_length, limit))

    def check(
        self, before: LayerModel, ready: list[int], floor: int, prefetch: LayerPrefetch
    ) -> set[int]:
        """Everything that must hold afterwards. Returns the host slots that were fetched.

        Args:
            before: the layer.
            ready: its list.
            floor: of the step.
            prefetch: what ran.
        """
        fetched = self._fetched(prefetch)
        layer, held = self.layer, self._check_rows(before)
        now = {slot: (owner, floor) for slot, (owner, _) in held.items() if owner in fetched}
        assert held == before.held | now and len(now) == len(fetched)
        assert before.held.keys().isdisjoint(now), "a row has left"
        taken = {*ready[: int(layer.cursor[TAKEN])]} - before.held.keys()
        assert now.keys() <= taken
        rows = range(len(self.lens))
        named = Counter(slot for row in rows for slot in self.candidates(row))
        # Whoever takes a name for a row that another claims meanwhile has taken it in vain.
        assert len(taken) - len(now) <= sum(named.values()) - len(named), "a slot has leaked"
        assert layer.totals.tolist() == [0, len(fetched), 0, 0, len(fetched)]
        layer.model.held = held
        return fetched

    def check_beside_recall(
        self,
        before: LayerModel,
        floor: int,
        prefetch: LayerPrefetch,
        wanted: Tensor,
        device_slots: Tensor,
        totals: Tensor,
    ) -> set[int]:
        """The same where a selection was made resident meanwhile. Returns what was fetched.

        Args:
            before: the layer.
            floor: of the step.
            prefetch: what ran.
            wanted: [T, k] int32 host slots, -1 for none.
            device_slots: [T, k] int32, where they are said to be.
            totals: [TOTALS] int64, counted by `make_resident`.
        """
        fetched = self._fetched(prefetch)
        held = self._check_rows(before)
        where = {owner: slot for slot, (owner, _) in held.items()}
        assert device_slots.tolist() == [
            [where[slot] if slot >= 0 else -1 for slot in row] for row in wanted.tolist()
        ]
        selected = set(wanted.flatten().tolist()) - {-1}
        levels = dict(held.values())
        assert all(levels[slot] > floor for slot in selected)
        assert all(levels[slot] == floor for slot in fetched - selected)
        there = {owner for owner, _ in before.held.values()}
        assert set(levels) <= there | fetched | selected
        for slot, (owner, level) in before.held.items():
            if owner in selected or level >= floor:
                assert held[slot][0] == owner
        missing = selected - there - fetched
        left = len(before.held) + len(fetched) + len(missing) - len(held)
        assert totals.tolist() == [
            len(selected) - len(missing), len(missing), left, 0, len(missing)
        ]  # fmt: skip
        assert self.layer.totals.tolist() == [0, len(fetched), 0, 0, len(fetched)]
        return fetched

    def _fetched(self, prefetch: LayerPrefetch) -> set[int]:
        """What is noted as fetched, which only candidates within their budgets may be."""
        found = prefetch.found
        host_slots, scores, counts = found.host_slots.cpu(), found.scores.cpu(), found.counts.cpu()
        fetched: list[int] = []
        for row in range(len(self.lens)):
            count, allowed = int(counts[row]), self.candidates(row)
            assert 0 <= count <= self.budget(row, prefetch)
            assert (scores[row, count:] == -torch.inf).all()
            listed = Counter(scores[row, :count].tolist())
            assert not listed - Counter(allowed.values()), "a score that is no candidate's"
            assert (host_slots[row, count:] == -1).all()
            assert (host_slots[row] >= -1).all()
            mine = [
                (slot, score)
                for slot, score in zip(host_slots[row].tolist(), scores[row].tolist(), strict=True)
                if slot >= 0
            ]
            assert all(allowed.get(slot) == score for slot, score in mine)
            fetched += [slot for slot, _ in mine]
        assert len(set(fetched)) == len(fetched), "fetched twice"
        return set(fetched)

    def _check_rows(self, before: LayerModel) -> dict[int, tuple[int, int]]:
        """That mappings agree and rows are where they say: who holds each slot, and its level."""
        tensors, layer = self.layer.tensors, self.layer
        owners, levels = tensors.device_to_host.tolist(), tensors.priority.tolist()
        held = {slot: (owner, levels[slot]) for slot, owner in enumerate(owners) if owner >= 0}
        tensors.assert_is(LayerModel(before.device_slots, before.host_slots, held))
        resident = sorted(held)
        rows = torch.tensor([held[slot][0] for slot in resident], dtype=torch.long)
        slots = torch.tensor(resident, dtype=torch.long)
        assert torch.equal(layer.device_rows.cpu()[slots], layer.host_rows[rows])
        return held


def make_case(
    rng: random.Random,
    under_test: LayerUnderTest,
    lens: list[int],
    shared_blocks: int = 0,
) -> PrefetchCase:
    """Requests whose first blocks are the same and whose other blocks are their own."""
    blocks = under_test.model.host_slots // 64
    ids = rng.sample(range(blocks), blocks)
    shared, own = ids[:shared_blocks], ids[shared_blocks:]
    counts = [-(-length // 64) for length in lens]
    tables = torch.full((len(lens), max(1, *counts)), -1, dtype=torch.int32)
    for row, count in enumerate(counts):
        table = (shared + [own.pop() for _ in range(max(0, count - shared_blocks))])[:count]
        tables[row, :count] = torch.tensor(table, dtype=torch.int32)
    return PrefetchCase(under_test, lens, tables, list(range(len(lens))), rng)


def mixed_case(rng: random.Random, floor: int, row_bytes: int) -> PrefetchCase:
    """Requests that share blocks, padding, one without prediction and some with limits; no GPU."""
    model = layer_in_use(rng, 400, 1280, rng.choice([0.2, 1.0]), floor)
    under_test = LayerUnderTest(model, torch.device("cpu"), row_bytes)
    case = make_case(rng, under_test, [130, 0, 200, 63, 257, 64], shared_blocks=2)
    case.thresholds[case.request_slots[3]] = torch.inf
    case.limits[case.request_slots[4]] = 0
    case.limits[case.request_slots[2]] = 2
    case.request_slots[5] = -1
    return case


def contended_case(rng: random.Random, floor: int) -> PrefetchCase:
    """Few slots: shared rows, candidates among the victims; no GPU."""
    model = layer_in_use(rng, 48, 256, rng.choice([0.5, 1.0]), floor)
    under_test = LayerUnderTest(model, torch.device("cpu"))
    case = make_case(rng, under_test, [rng.choice([1, 65, 190]) for _ in range(5)], 3)
    case.thresholds.fill_(rng.choice([-1.0, 0.0, 1.0]))
    return case


def ints(values: list[int]) -> Tensor:
    """[n] int32 on the CPU."""
    return torch.tensor(values, dtype=torch.int32)
