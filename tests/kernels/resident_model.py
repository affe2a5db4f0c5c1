"""One layer through `make_resident`, on whatever runs it, against the plain Python model.

Which of equally old rows leave, and which slot a row gets, is free; all else must be exact: what
is found, recalled, evicted and allocated, the priorities of those who leave, the mappings, the
rows' bytes, and where each entry is said to be.
"""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from tests.kernels.cache_model import LayerModel, LayerTensors
from torch import Tensor

from echokv.kernels.cuda.victims import AGES
from echokv.kernels.fused_layer import (
    BEGAN,
    CURSOR,
    LISTED,
    STALE,
    TAKEN,
    TOTALS,
    TOUCHED,
    FusedLayer,
    FusedLayers,
    NewRows,
)
from echokv.kernels.reference.priorities import score_priorities


class FusedOps(Protocol):
    """`kernels.cuda.fused`, or the emulator."""

    choose_victims: Any
    make_resident: Any
    append_rows: Any


class LayerUnderTest:
    """The tensors of one layer and its pools, filled to match a model."""

    def __init__(self, model: LayerModel, device: torch.device, row_bytes: int = 48) -> None:
        self.model, self.device = model, device
        self.tensors = LayerTensors.of(model, device)
        host_rows = torch.randint(0, 256, (model.host_slots, row_bytes), dtype=torch.uint8)
        self.host_rows = host_rows.pin_memory() if device.type == "cuda" else host_rows
        self.device_rows = torch.full(
            (model.device_slots, row_bytes), 0xDB, dtype=torch.uint8, device=device
        )
        for slot, (owner, _) in model.held.items():
            self.device_rows[slot] = host_rows[owner].to(device)
        self.cursor = torch.zeros(CURSOR, dtype=torch.int32, device=device)
        self.barrier = torch.zeros(1, dtype=torch.int32, device=device)
        self.totals = torch.zeros(TOTALS, dtype=torch.int64, device=device)

    def layer(self, floor: int) -> FusedLayer:
        """The argument of the fused ops; totals count from zero."""
        return FusedLayer(
            floor=torch.tensor([floor], dtype=torch.int32, device=self.device),
            **self._mappings(),
            ready=self.tensors.slot_buffer,
            cursor=self.cursor,
            barrier=self.barrier,
            totals=self.totals.zero_(),
            host_rows=self.host_rows,
            device_rows=self.device_rows,
        )

    def _mappings(self) -> dict[str, Tensor]:
        names = ("device_free", "priority", "device_to_host", "host_to_device")
        return dict(zip(names, self.tensors.mappings(), strict=True))

    def _check_freed(self, wanted: int, since: int) -> None:
        """The first slots on the list are free: who had them has left, and nobody else."""
        model, began, listed = self.model, int(self.cursor[BEGAN]), int(self.cursor[LISTED])
        first = self.tensors.slot_buffer.tolist()[began : min(began + wanted, listed)]
        left = [slot for slot in first if slot in model.held]
        assert all(model.held[slot][1] < since for slot in left)
        assert self.totals.tolist() == [0, 0, len(left), 0, 0]
        for slot in left:
            del model.held[slot]
        self.tensors.assert_is(model)

    def choose(self, ops: FusedOps, floor: int, free: int = 0) -> list[int]:
        """Have the ready list made anew, and check its order; returns it.

        Args:
            ops: what runs it.
            floor: the step's.
            free: the slots of so many of the first names are to be free.
        """
        self.cursor[TOUCHED] = STALE
        self.cursor[BEGAN] = self.cursor[TAKEN] - free
        self.tensors.slot_buffer.fill_(-77)
        assert self.begin(ops, floor, 1, free, partly=True), "a stale list was kept"
        ready, levels = self.tensors.slot_buffer.tolist(), self.tensors.priority.tolist()
        may_go = sum(level < floor for level in levels)
        assert self.cursor.tolist() == [0, 0, may_go, floor, 0]
        assert ready[may_go:] == [-77] * (len(ready) - may_go)
        return ready[:may_go]

    def begin(
        self,
        ops: FusedOps,
        floor: int,
        most_rows: int,
        most_free: int = 0,
        *,
        partly: bool = False,
    ) -> bool:
        """`choose_victims` at the start of a step, at a higher floor than the last; whether it has
        made a new list.

        Names that are left must be enough, and in the order in which slots may leave now; the first
        of them are of free slots, as many as are wanted.
        """
        touched_before = int(self.cursor[TOUCHED])
        taken_before = int(self.cursor[TAKEN] - self.cursor[BEGAN])
        layer = self.layer(floor)
        ops.choose_victims(
            FusedLayers(
                floor=layer.floor,
                totals=layer.totals[None],
                cursor=self.cursor[None],
                ready=self.tensors.slot_buffer[None],
                **{name: tensor[None] for name, tensor in self._mappings().items()},
            ),
            most_rows,
            most_free,
            partly=partly,
        )
        taken, touched, listed, since, began = self.cursor.tolist()
        assert taken == began
        free = taken_before + taken_before // 2
        if free > most_free:
            free = most_free if partly else 0
        self._check_freed(free, since)
        levels = self.tensors.priority.tolist()
        # Ages beyond the bins are alike.
        rank = [max(level, since - AGES + 1) if level >= 0 else -1 for level in levels]
        names = self.tensors.slot_buffer.tolist()[taken:listed]
        left = [slot for slot in names if levels[slot] < since]
        may_go = sorted(rank[slot] for slot in range(len(rank)) if levels[slot] < floor)
        assert len(set(left)) == len(left) >= min(most_rows, len(may_go))
        assert [rank[slot] for slot in left] == may_go[: len(left)]
        assert touched >= len(names) - len(left)
        if touched < touched_before < STALE:  # the first names were looked at
            assert names[:1] == left[:1]
        return since == floor

    def fetch(
        self,
        ops: FusedOps,
        wanted: Tensor,
        scores: Tensor,
        floor: int,
        *,
        new: list[int] | None = None,
        **plan: Any,
    ) -> None:
        """One `make_resident`, then every check.

        Args:
            ops: what runs it.
            wanted: the selection.
            scores: of it.
            floor: the step's.
            new: host slots of random rows that are appended with it; None: none are.
            plan: for the op.
        """
        model = self.model
        found = torch.full_like(wanted, -77)
        before = dict(model.held)
        want_host, new_rows = self.host_rows.clone(), None
        if new is not None:
            rows = torch.randint(0, 256, (len(new), self.host_rows.shape[1]), dtype=torch.uint8)
            for slot, row in zip(new, rows, strict=True):
                if slot >= 0:
                    want_host[slot] = row
            new_slots = torch.tensor(new, dtype=torch.int32, device=self.device)
            new_rows = NewRows(new_slots, rows.to(self.device))
        ops.make_resident(
            wanted.to(self.device),
            scores.to(self.device),
            self.layer(floor),
            found := found.to(self.device),
            new_rows=new_rows,
            **plan,
        )
        new = new or []
        slots = wanted.flatten().tolist()
        levels = expected_levels(wanted, scores, floor)
        absent, _ = model.lookup(new, [floor] * len(new), floor)
        missing, hits = model.lookup(slots, levels, floor)
        hits += len(set(missing) & set(absent))
        missing = [slot for slot in missing if slot not in absent]
        victims = model.free(len(absent) + len(missing), floor)
        given = model.allocate(absent, floor) + model.allocate(missing, floor)
        model.translate(slots, levels)
        assert self.totals.tolist() == [hits, len(missing), len(victims), len(absent), len(given)]
        assert torch.equal(self.host_rows, want_host)
        self._check_state(before, slots, found.flatten().tolist(), floor, new)
        model.held = self._held()  # the freedoms that were taken

    def append(self, ops: FusedOps, host_slots: list[int], floor: int) -> None:
        """One `append_rows` of random rows, then every check."""
        model, before = self.model, dict(self.model.held)
        rows = torch.randint(0, 256, (len(host_slots), self.host_rows.shape[1]), dtype=torch.uint8)
        want = self.host_rows.clone()
        for slot, row in zip(host_slots, rows, strict=True):
            if slot >= 0:
                want[slot] = row
        ops.append_rows(
            torch.tensor(host_slots, dtype=torch.int32, device=self.device),
            rows.to(self.device),
            self.layer(floor),
        )
        levels = [floor] * len(host_slots)
        missing, _ = model.lookup(host_slots, levels, floor)
        victims = model.free(len(missing), floor)
        given = model.allocate(missing, floor)
        assert self.totals.tolist() == [0, 0, len(victims), len(missing), len(given)]
        assert torch.equal(self.host_rows, want)
        where = {owner: slot for slot, (owner, _) in self._held().items()}
        self._check_state(before, host_slots, [where.get(slot, -1) for slot in host_slots], floor)
        model.held = self._held()

    def _held(self) -> dict[int, tuple[int, int]]:
        owners = self.tensors.device_to_host.tolist()
        levels = self.tensors.priority.tolist()
        return {slot: (owner, levels[slot]) for slot, owner in enumerate(owners) if owner >= 0}

    def _check_state(
        self,
        before: dict[int, tuple[int, int]],
        wanted: list[int],
        found: list[int],
        floor: int,
        new: Sequence[int] = (),
    ) -> None:
        held, model = self._held(), self.model
        LayerTensors.assert_is(self.tensors, LayerModel(model.device_slots, model.host_slots, held))
        oldest = floor - AGES + 1
        assert Counter(max(level, oldest) for _, level in held.values()) == Counter(
            max(level, oldest) for _, level in model.held.values()
        )
        selected = {*wanted, *new} - {-1}
        assert {o: v for o, v in held.values() if o in selected} == {
            o: v for o, v in model.held.values() if o in selected
        }
        for slot, (owner, level) in before.items():  # protected rows stay where they are
            if owner in selected or level >= floor:
                assert held[slot][0] == owner
        where = {owner: slot for slot, (owner, _) in held.items()}
        assert found == [where.get(slot, -1) for slot in wanted]
        resident = torch.tensor(sorted(held), dtype=torch.long)
        owners = torch.tensor([held[slot][0] for slot in sorted(held)], dtype=torch.long)
        assert torch.equal(self.device_rows.cpu()[resident], self.host_rows[owners])


def check_new_rows(
    ops: FusedOps, device: torch.device, seed: int, *, rows: int, **plan: Any
) -> None:
    """New rows where who is next to leave is selected, and so found by some block, maybe late.

    Free slots come before them on the list, or some that have been used since it was made.

    Args:
        ops: what runs it.
        device: where.
        seed: of the case.
        rows: of the selection, at most.
        plan: for the op.
    """
    rng = random.Random(seed)
    free = rng.choice([0, 0, 2, 20])
    model = LayerModel(40, 90, {slot: (slot, 700 + slot) for slot in range(free, 40)})
    under_test = LayerUnderTest(model, device)
    names = under_test.choose(ops, 800)
    assert names[free:] == list(range(free, 40))
    if rng.random() < 0.3:  # of those that somebody has, the first to leave
        used = torch.tensor([names[free : free + 3]], dtype=torch.int32)
        under_test.fetch(ops, used, torch.rand(used.shape), 800)
    new = rng.sample(range(40, 90), rng.choice([1, 3, 6]))
    others = list({*rng.sample(range(free, 40), 10), *names[free : free + 8]})
    wanted = torch.full((rng.choice([1, rows // 3 + 1, rows]), 24), -1, dtype=torch.int32)
    for row in wanted:
        some = rng.sample(others + new, len(others) + rng.randint(0, len(new)))
        row[: len(some)] = torch.tensor(some, dtype=torch.int32)
    under_test.fetch(ops, wanted, torch.randn(wanted.shape), 800, new=new, **plan)
    taken, touched, listed, since, _ = under_test.cursor.tolist()
    if free >= len(new):  # then nobody was passed over
        levels = under_test.tensors.priority[names[taken:listed]]
        assert [taken, touched] == [len(new), int((levels >= since).sum())]


def expected_levels(wanted: Tensor, scores: Tensor, floor: int) -> list[int]:
    """`score_priorities` of the reference."""
    priorities = torch.empty_like(wanted)
    clock = torch.tensor([floor >> 3], dtype=torch.int32)
    score_priorities(clock, scores, wanted, priorities)
    return priorities.flatten().tolist()


def selection(rng: random.Random, pool: list[int], rows: int, k: int) -> Tensor:
    """Rows of host slots from a pool: duplicates within and across rows, -1 at their ends."""
    wanted = torch.full((rows, k), -1, dtype=torch.int32)
    for row in wanted:
        count = rng.choice([0, 1, k // 2, k, k])
        row[:count] = torch.tensor([rng.choice(pool) for _ in range(count)], dtype=torch.int32)
    return wanted
