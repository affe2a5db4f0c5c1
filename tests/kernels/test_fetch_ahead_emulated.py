"""`fetch_ahead` without a GPU, threads in random order; what it may do is `prefetch_model`'s."""

import copy
import random

import pytest
import torch
from tests.kernels import cuda_emulator
from tests.kernels.cache_model import LayerModel, layer_in_use
from tests.kernels.cuda_emulator import Emulator
from tests.kernels.prefetch_model import PrefetchCase, contended_case, ints, make_case, mixed_case
from tests.kernels.resident_model import LayerUnderTest

from echokv.kernels.cuda.index_scores import Prefetch

CPU = torch.device("cpu")
FLOOR = 4096
pytestmark = pytest.mark.skipif(cuda_emulator.COMPILER is None, reason="needs g++")


def fetch(
    emulator: Emulator,
    case: PrefetchCase,
    most: int,
    rows_per_unit: int,
    least: int,
    blocks: int = 3,
) -> set[int]:
    """Make the ready list, fetch, check."""
    ready = case.layer.choose(emulator, FLOOR)
    return fetch_from(emulator, case, ready, most, rows_per_unit, least, blocks)


def fetch_from(
    emulator: Emulator,
    case: PrefetchCase,
    ready: list[int],
    most: int,
    rows_per_unit: int,
    least: int,
    blocks: int = 3,
) -> set[int]:
    rows = len(case.lens)
    before = copy.deepcopy(case.layer.model)
    fused = case.fused_layer(FLOOR)
    host_slots = torch.full((rows, most), -1, dtype=torch.int32)
    scores, counts = torch.full((rows, most), -torch.inf), torch.zeros(rows, dtype=torch.int32)
    emulator.fetch_ahead(
        case.scores, ints(case.lens), case.tables, ints(case.request_rows),
        ints(case.request_slots), case.thresholds, case.enabled, fused, host_slots, scores, counts,
        rows_per_unit=rows_per_unit, least=least, blocks=blocks,
    )  # fmt: skip
    found = Prefetch(
        host_slots=host_slots, scores=scores, counts=counts, layer=fused, arguments=None
    )  # type: ignore[arg-type]
    budgets = [case.budget(row, most, rows_per_unit, least) for row in range(rows)]
    fetched = case.check(before, ready, FLOOR, found, budgets)
    # Nothing is forgotten: a candidate that stayed away had no budget, or came by another's.
    held = {owner for owner, _ in before.held.values()}
    for row in range(rows):
        absent = set(case.candidates(row)) - held
        if case.enabled[case.request_slots[row]] and len(absent) <= budgets[row]:
            assert absent <= fetched or len(fetched) >= before.device_slots - 40
    return fetched


@pytest.mark.parametrize("row_bytes", [16, 656, 2304])
def test_fetching(emulator: Emulator, row_bytes: int) -> None:
    """Requests that share blocks, padding, one without prediction and one switched off."""
    for seed in range(8):
        case = mixed_case(random.Random(seed), FLOOR, row_bytes)
        assert fetch(emulator, case, 40, 65536 // 8, 3)


def test_fetching_in_many_orders(emulator: Emulator) -> None:
    """Few slots and much contention: shared rows, candidates among the victims."""
    for seed in range(80):
        rng = random.Random(seed)
        case = contended_case(rng, FLOOR)
        fetch(emulator, case, rng.choice([1, 2, 9]), 0, rng.choice([0, 1, 9]),
              rng.choice([1, 3, 5]))  # fmt: skip


@pytest.mark.parametrize("threshold", [0.0, -torch.inf, torch.inf, torch.nan, -1e30, 1e30])
@pytest.mark.parametrize("most, rows_per_unit, least", [(1, 0, 0), (1, 0, 9), (50, 2**31, 2**31)])
def test_hostile_predictions_and_budgets(
    emulator: Emulator, threshold: float, most: int, rows_per_unit: int, least: int
) -> None:
    rng = random.Random(5)
    under_test = LayerUnderTest(layer_in_use(rng, 300, 960, 0.9, FLOOR), CPU)
    case = make_case(rng, under_test, [400, 0, 129], 1)
    case.thresholds.fill_(threshold)
    fetched = fetch(emulator, case, most, rows_per_unit, least)
    assert bool(fetched) == (least > 0 and threshold <= 0)


def test_everything_is_found(emulator: Emulator) -> None:
    """A queue that overflows many times: every candidate of long contexts."""
    rng = random.Random(6)
    under_test = LayerUnderTest(LayerModel(2000, 6400), CPU, 16)
    case = make_case(rng, under_test, [900, 64, 700])
    case.thresholds.fill_(-0.5)
    want = set().union(*(set(case.candidates(row)) for row in range(3)))
    assert len(want) > 900
    assert fetch(emulator, case, 1000, 0, 1000, blocks=1) == want
    assert fetch(emulator, case, 1000, 0, 1000) == set()


def test_scores_that_are_not_finite(emulator: Emulator) -> None:
    """NaN beats nothing, +inf everything but a missing prediction."""
    rng = random.Random(3)
    under_test = LayerUnderTest(LayerModel(300, 640), CPU)
    case = make_case(rng, under_test, [100, 90])
    case.scores[:, :40] = torch.nan
    case.scores[:, 50:60] = torch.inf
    case.thresholds[case.request_slots[0]] = torch.inf
    case.thresholds[case.request_slots[1]] = 1e30
    table = case.tables[1].tolist()
    assert fetch(emulator, case, 64, 0, 64) == {table[0] * 64 + at for at in range(50, 60)}


def test_protected_rows_stay(emulator: Emulator) -> None:
    """All slots but three are at the floor: three rows come, the others find no room."""
    rng = random.Random(7)
    model = layer_in_use(rng, 40, 640, 1.0, FLOOR)
    model.held = {
        slot: (owner, FLOOR + slot % 5 if slot >= 3 else level)
        for slot, (owner, level) in model.held.items()
    }
    under_test = LayerUnderTest(model, CPU)
    case = make_case(rng, under_test, [300, 200])
    case.enabled.fill_(1)
    rows = case.layer
    ready = rows.choose(emulator, FLOOR)
    before = copy.deepcopy(rows.model)
    host_slots = torch.full((2, 30), -1, dtype=torch.int32)
    counts = torch.zeros(2, dtype=torch.int32)
    fused, scores = case.fused_layer(FLOOR), torch.full((2, 30), -torch.inf)
    emulator.fetch_ahead(
        case.scores, ints(case.lens), case.tables, ints(case.request_rows),
        ints(case.request_slots), case.thresholds, case.enabled, fused, host_slots, scores, counts,
        rows_per_unit=0, least=30,
    )  # fmt: skip
    found = Prefetch(host_slots=host_slots, scores=scores, counts=counts, layer=fused,
                     arguments=None)  # type: ignore[arg-type]  # fmt: skip
    assert len(case.check(before, ready, FLOOR, found, [30, 30])) == 3
