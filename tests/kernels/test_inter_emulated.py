"""Inter-query prefetch without a GPU, threads in random order: bounds, claims, and who moves.

Scores are given; what counts them, finds bounds, fetches and evicts is the source that the GPU runs
(prefill_prefetch.cuh, prefetch.cuh, claims.cuh, tiles.cuh).
"""

import copy
import random

import pytest
import torch
from tests.kernels import cuda_emulator
from tests.kernels.cache_model import layer_in_use
from tests.kernels.cuda_emulator import Emulator
from tests.kernels.inter_model import InterCase
from tests.kernels.prefetch_model import ints
from tests.kernels.resident_model import LayerUnderTest

CPU = torch.device("cpu")
FLOOR = 4096
pytestmark = pytest.mark.skipif(cuda_emulator.COMPILER is None, reason="needs g++")


def prefetch(
    emulator: Emulator, case: InterCase, k: int, most: int, **how: int
) -> tuple[set[int], set[int]]:
    """Prefetch, check; fetch what is late, check. What came early, and what came in all."""
    ready = case.layer.choose(emulator, FLOOR)
    before = copy.deepcopy(case.layer.model)
    found = emulator.inter_prefetch(
        case.scores, ints(case.lens), ints(case.request_rows), case.tables, case.shifts,
        case.fused_layer(FLOOR), k=k, most=most, **how,
    )  # fmt: skip
    case.check_bounds(found, k)
    early = case.check_fetched(found, ready, FLOOR, before)
    emulator.inter_fetch_late(found)
    fetched = case.check_fetched(found, ready, FLOOR, before)
    case.check_all(fetched, before, k, most)
    assert early <= fetched
    return early, fetched


def in_use(rng: random.Random, slots: int, host_slots: int, row_bytes: int = 48) -> LayerUnderTest:
    model = layer_in_use(rng, slots, host_slots, rng.choice([0.2, 1.0]), FLOOR)
    return LayerUnderTest(model, CPU, row_bytes)


@pytest.mark.parametrize("row_bytes", [16, 656, 2304])
def test_prefetch(emulator: Emulator, row_bytes: int) -> None:
    """Chunks that share blocks, single rows, rows shorter than k."""
    for seed in range(4):
        rng = random.Random(seed)
        case = InterCase(
            in_use(rng, 900, 2560, row_bytes), [(300, 80), (70, 1), (200, 30), (9, 9)], rng
        )
        assert prefetch(emulator, case, 20, 900)[1]


def test_prefetch_in_many_orders(emulator: Emulator) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        chunks = [(rng.choice([40, 65, 190]), rng.choice([1, 9, 40])) for _ in range(3)]
        case = InterCase(in_use(rng, 260, 640), chunks, rng, shared=rng.choice([0, 2]))
        prefetch(emulator, case, rng.choice([1, 8, 64]), rng.choice([1, 7, 200]),
                 blocks=rng.choice([1, 3, 5]), scoring=rng.choice([1, 3]),
                 fetching=rng.choice([1, 2]))  # fmt: skip


def test_rows_move_before_the_last_score(emulator: Emulator) -> None:
    early = 0
    for seed in range(3):
        rng = random.Random(seed)
        case = InterCase(in_use(rng, 3000, 3200), [(2500, 200)], rng, shared=0)
        early += len(prefetch(emulator, case, 30, 2500)[0])
    assert early > 100


@pytest.mark.parametrize("shift", [0.0, torch.inf, -torch.inf, torch.nan, -1e30, 1e30])
@pytest.mark.parametrize("most", [1, 500])
def test_hostile_shifts(emulator: Emulator, shift: float, most: int) -> None:
    rng = random.Random(5)
    case = InterCase(in_use(rng, 500, 1280), [(300, 70), (129, 3)], rng)
    case.shifts.fill_(shift)
    prefetch(emulator, case, 20, most)


def test_hostile_scores(emulator: Emulator) -> None:
    """Equal ones, infinities, and NaN within the context."""
    for value in (0.0, -0.0, torch.inf, -torch.inf, torch.nan):
        rng = random.Random(6)
        case = InterCase(in_use(rng, 500, 1280), [(300, 70)], rng)
        case.scores[::3] = value
        case.scores[:, ::7] = value
        prefetch(emulator, case, 20, 500)


def test_nothing_to_do(emulator: Emulator) -> None:
    """Only padding; and everything resident."""
    rng = random.Random(7)
    case = InterCase(in_use(rng, 100, 640), [(64, 3)], rng)
    case.lens = [0, 0, 0]
    assert prefetch(emulator, case, 5, 50) == (set(), set())
