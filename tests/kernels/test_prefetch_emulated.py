"""The fused prefetch's schedule and claims without a GPU, threads in random order.

Scores are given; what hands them over, takes budgets, claims, evicts and copies is the source that
the GPU runs (prefetch.cuh, claims.cuh, schedule.cuh).
"""

import copy
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels import cuda_emulator
from tests.kernels.cache_model import LayerModel, layer_in_use
from tests.kernels.cuda_emulator import Emulator
from tests.kernels.prefetch_model import PrefetchCase, contended_case, ints, make_case, mixed_case
from tests.kernels.resident_model import LayerUnderTest, selection

from echokv.kernels.fused_layer import TOTALS
from echokv.kernels.prefetch_args import Candidates

CPU = torch.device("cpu")
FLOOR = 4096
pytestmark = pytest.mark.skipif(cuda_emulator.COMPILER is None, reason="needs g++")


def prefetch(
    emulator: Emulator,
    case: PrefetchCase,
    most: int,
    rows_per_unit: int,
    least: int,
    *,
    free: int = 1000,
    **how: Any,
) -> set[int]:
    """Make the ready list, with so many free slots at least, prefetch, check. What came in."""
    ready = case.layer.choose(emulator, FLOOR, free)
    before = copy.deepcopy(case.layer.model)
    ahead = case.prefetch(
        FLOOR, emulator.candidate_lists(CPU), most=most, rows_per_unit=rows_per_unit, least=least
    )
    rows = (ints(case.request_rows), ints(case.lens))
    emulator.prefetch(case.scores, case.tables, *rows, ahead, **how)
    return case.check(before, ready, FLOOR, ahead)


@pytest.mark.parametrize("row_bytes", [16, 656, 2304])
def test_prefetch(emulator: Emulator, row_bytes: int) -> None:
    """Requests that share blocks, padding, one without prediction and some with limits."""
    for seed in range(8):
        case = mixed_case(random.Random(seed), FLOOR, row_bytes)
        assert prefetch(emulator, case, 40, 65536 // 8, 3)


def test_prefetch_in_many_orders(emulator: Emulator) -> None:
    """Few slots and much contention: shared rows, candidates among the victims."""
    for seed in range(80):
        rng = random.Random(seed)
        case = contended_case(rng, FLOOR)
        prefetch(emulator, case, rng.choice([1, 2, 9]), 0, rng.choice([0, 1, 9]),
                 blocks=rng.choice([1, 3, 5]), scoring=rng.choice([1, 2, 4]),
                 known=rng.choice([False, True]), free=rng.choice([1, 5, 48]),
                 tick=rng.choice([0, 0, 10**5, 10**7]))  # fmt: skip


def test_a_selection_is_made_resident_while_rows_are_fetched(emulator: Emulator) -> None:
    """`make_resident` begins at any time: what it finds stays, and what it has not found it brings.

    Few slots that may leave, many of them selected.
    """
    early = late = 0
    for seed in range(160):
        rng = random.Random(seed)
        under_test = LayerUnderTest(layer_in_use(rng, 180, 640, 1.0, FLOOR), CPU)
        case = make_case(rng, under_test, [190, 150, 100], 1)
        case.thresholds.fill_(rng.choice([-0.5, 0.5]))
        under_test.choose(emulator, FLOOR, rng.choice([3, 20, 40]))
        before = copy.deepcopy(under_test.model)
        # What may be being fetched; and rows that are there, oldest first, and some that aren't.
        named = [slot for row in range(3) for slot in case.candidates(row)]
        pool = rng.sample(named, min(30, len(named)))
        if seed % 2:
            old = sorted(before.held.values(), key=lambda held: held[1])
            pool = [owner for owner, level in old if level < FLOOR][:30]
            pool += rng.sample(range(640), 20)
        wanted = selection(rng, pool, 3, 40)
        most = 9
        ahead = case.prefetch(
            FLOOR, emulator.candidate_lists(CPU), most=most, rows_per_unit=0, least=most
        )
        slots, totals = torch.full_like(wanted, -77), torch.zeros(TOTALS, dtype=torch.int64)
        emulator.prefetch_beside_recall(
            (case.scores, case.tables, ints(case.request_rows), ints(case.lens)), ahead,
            (wanted, torch.randn(wanted.shape), replace(ahead.layer, totals=totals), slots),
            blocks=rng.choice([1, 3]), recalling=rng.choice([1, 2, 4]),
            pauses=rng.randrange(600), known=rng.random() < 0.3,
        )  # fmt: skip
        fetched = case.check_beside_recall(before, FLOOR, ahead, wanted, slots, totals)
        early, late = early + len(fetched), late + int(totals[1])
    assert early > 1000 and late > 1000


def test_nothing_is_claimed_once_the_selection_is_known(emulator: Emulator) -> None:
    """Of many candidates some are fetched before, none of what was still to come after."""
    counts = []
    for seed in range(6):
        rng = random.Random(seed)
        under_test = LayerUnderTest(layer_in_use(rng, 400, 6400, 0.5, FLOOR), CPU, 16)
        case = make_case(rng, under_test, [3000, 3000])
        case.thresholds.fill_(1.2)
        counts.append(len(prefetch(emulator, case, 200, 0, 200, known=True)))
    assert max(counts) < 400 and sum(counts) > 0


def test_whoever_waits_too_long_leaves(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that runs fast, fetching warps give up while others still score."""
    counts = [0, 0]
    for which, tick in enumerate((0, 10**9)):
        for seed in range(4):  # in some orders nobody has to wait
            monkeypatch.setattr(emulator, "seed", seed)
            rng = random.Random(4)
            under_test = LayerUnderTest(layer_in_use(rng, 400, 6400, 0.5, FLOOR), CPU, 16)
            case = make_case(rng, under_test, [3000, 3000])
            case.thresholds.fill_(1.2)
            counts[which] += len(prefetch(emulator, case, 300, 0, 300, tick=tick))
    assert counts[0] > counts[1]


@pytest.mark.parametrize("threshold", [0.0, -torch.inf, torch.inf, torch.nan, -1e30, 1e30])
@pytest.mark.parametrize("most, rows_per_unit, least", [(1, 0, 0), (1, 0, 9), (50, 2**31, 2**31)])
def test_hostile_predictions_and_budgets(
    emulator: Emulator, threshold: float, most: int, rows_per_unit: int, least: int
) -> None:
    rng = random.Random(5)
    under_test = LayerUnderTest(layer_in_use(rng, 300, 960, 0.9, FLOOR), CPU)
    case = make_case(rng, under_test, [400, 0, 129], 1)
    case.thresholds.fill_(threshold)
    prefetch(emulator, case, most, rows_per_unit, least)


def test_everything_is_found_where_nothing_is_in_a_hurry(emulator: Emulator) -> None:
    """Rows of their own, free slots, as few candidates as a list holds: as many as the budget."""
    rng = random.Random(6)
    under_test = LayerUnderTest(layer_in_use(rng, 400, 960, 0.3, FLOOR), CPU)
    case = make_case(rng, under_test, [128, 64, 300])
    case.thresholds.fill_(1.8)
    held = {owner for owner, _ in under_test.model.held.values()}
    want = [set(case.candidates(row)) - held for row in range(3)]
    assert all(len(slots) >= 2 for slots in want[::2])
    assert prefetch(emulator, case, 50, 0, 50) == set().union(*want)
    under_test.model.held = {}
    under_test = LayerUnderTest(under_test.model, CPU)
    case.layer = under_test
    assert len(prefetch(emulator, case, 2, 0, 50)) == sum(
        min(2, len(case.candidates(row))) for row in range(3)
    )


def test_a_list_holds_pages_of_candidates(emulator: Emulator) -> None:
    """All of a page at once, more than a warp takes at a time: none is forgotten."""
    for seed in range(10):
        rng = random.Random(seed)
        under_test = LayerUnderTest(LayerModel(100, 640), CPU)
        case = make_case(rng, under_test, [64])
        case.thresholds.fill_(-torch.inf)
        table = case.tables[0].tolist()
        want = {table[0] * 64 + at for at in range(64)}
        assert prefetch(emulator, case, 64, 0, 64, blocks=1, scoring=1) == want


def test_no_candidate_counts_twice_when_lists_overflow(emulator: Emulator) -> None:
    for seed in range(10):
        rng = random.Random(seed)
        under_test = LayerUnderTest(LayerModel(100, 3200), CPU)
        case = make_case(rng, under_test, [1500, 1100])
        case.thresholds.fill_(-torch.inf)
        case.limits.zero_()
        assert prefetch(emulator, case, 2000, 0, 2000, blocks=1) == set()


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
    want = {table[0] * 64 + at for at in range(50, 60)}
    assert prefetch(emulator, case, 64, 0, 64) == want


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
    assert len(prefetch(emulator, case, 30, 0, 30)) == 3


def test_no_row_leaves(emulator: Emulator) -> None:
    """As many rows come as there are free slots; all others stay."""
    for seed in range(10):
        rng = random.Random(seed)
        under_test = LayerUnderTest(layer_in_use(rng, 60, 640, 1.0, FLOOR), CPU)
        case = make_case(rng, under_test, [300, 200])
        case.thresholds.fill_(-torch.inf)
        free = rng.choice([0, 3, 17])
        assert len(prefetch(emulator, case, 30, 0, 30, free=free)) == free


@pytest.mark.parametrize("blocks", [1, 2, 7, 33])
def test_shares_cover_every_page_once(emulator: Emulator, blocks: int) -> None:
    for seed in range(8):
        rng = random.Random(seed)
        rows = rng.choice([1, 2, 31, 32, 33, 100])
        lens = [rng.choice([0, 0, -5, 1, 64, 65, 300, 999_999]) for _ in range(rows)]
        width = 512  # rows beyond it count for no more
        under_test = LayerUnderTest(layer_in_use(rng, 8, 64, 0.0, FLOOR), CPU)
        case = make_case(rng, under_test, [0] * rows)
        case.request_slots = [-1] * rows
        lists = emulator.candidate_lists(CPU)
        shares = emulator.prefetch(
            torch.zeros(rows, width), torch.zeros((1, 8), dtype=torch.int32), ints([0] * rows),
            ints(lens), case.prefetch(FLOOR, lists, most=1, rows_per_unit=0, least=0),
            blocks=blocks, scoring=1,
        )  # fmt: skip
        pages = [(row, page) for row, n in enumerate(lens)
                 for page in range(-(-min(max(n, 0), width) // 64))]  # fmt: skip
        at = 0
        for row, page, count in shares.tolist():
            assert count in (len(pages) // blocks, -(-len(pages) // blocks))
            if count:
                assert pages[at] == (row, page)
            at += count
        assert at == len(pages)


def test_arguments_are_checked(emulator: Emulator) -> None:
    case = mixed_case(random.Random(0), FLOOR, 16)
    lists = emulator.candidate_lists(CPU)
    ahead, rows = case.prefetch(FLOOR, lists, most=2, rows_per_unit=0, least=0), len(case.lens)
    ahead.check(rows, CPU)
    wrong = {
        "request_slots must have shape [6], got [5]": {"request_slots": ahead.request_slots[1:]},
        "thresholds must be torch.float32": {"thresholds": ahead.thresholds.double()},
        "limits must have shape [8], got [7]": {"limits": ahead.limits[1:]},
        "found.host_slots must have shape [6, 2], got [3, 2]": {"found": ahead.found.rows(0, 3)},
        "kth_scores must be contiguous": {"kth_scores": torch.empty(2 * rows)[::2]},
        "found must have at least 1 column, got 0": {"found": Candidates.room(rows, 0, CPU)},
    }
    for message, fields in wrong.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            replace(ahead, **fields).check(rows, CPU)
    with pytest.raises(ValueError, match="request_slots must be on cuda:0, got cpu"):
        ahead.check(rows, torch.device("cuda:0"))
