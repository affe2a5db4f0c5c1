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
from tests.kernels.prefetch_model import PrefetchCase, ints
from tests.kernels.resident_model import LayerUnderTest
from torch import Tensor

from echokv.kernels.cuda.prefill_prefetch import InterPrefetch
from echokv.kernels.reference.score_bounds import score_bounds

CPU = torch.device("cpu")
FLOOR = 4096
pytestmark = pytest.mark.skipif(cuda_emulator.COMPILER is None, reason="needs g++")


class InterCase(PrefetchCase):
    """Chunks of several requests over a layer of the cache.

    Args:
        under_test: the layer.
        chunks: (context, queries) of each request; the first blocks of all are the same.
        rng: of everything random.
        shared: how many blocks.
    """

    def __init__(
        self,
        under_test: LayerUnderTest,
        chunks: list[tuple[int, int]],
        rng: random.Random,
        shared: int = 1,
    ) -> None:
        ids = rng.sample(
            range(under_test.model.host_slots // 64), under_test.model.host_slots // 64
        )
        common, own = ids[:shared], ids[shared:]
        counts = [-(-context // 64) for context, _ in chunks]
        tables = torch.full((len(chunks), max(1, *counts)), -1, dtype=torch.int32)
        lens, requests = [], []
        for request, ((context, queries), count) in enumerate(zip(chunks, counts, strict=True)):
            table = (common + [own.pop() for _ in range(max(0, count - shared))])[:count]
            tables[request, :count] = ints(table)
            lens += range(context - queries + 1, context + 1)
            requests += [request] * queries
        super().__init__(under_test, lens, tables, requests, rng)
        self.shifts = torch.full((len(chunks),), 0.8)

    def bounds(self, k: int) -> Tensor:
        """By the reference."""
        rows = ints(self.request_rows)
        return score_bounds(self.scores, ints(self.lens), rows, self.shifts, k)

    def wanted(self, k: int) -> set[int]:
        """Host slots that some row's bound lets in."""
        found = set()
        for row, (length, bound) in enumerate(zip(self.lens, self.bounds(k), strict=True)):
            request = self.request_rows[row]
            shifted = self.scores[row, :length] - self.shifts[request]
            table = self.tables[request].tolist()
            positions = (shifted >= bound).nonzero().squeeze(1).tolist()
            assert length < k or len(positions) < k
            found |= {table[at // 64] * 64 + at % 64 for at in positions}
        return found

    def check_fetched(self, found: InterPrefetch, ready: list[int], before: object) -> set[int]:
        """Only wanted rows have moved, each once, and the layer is what they come to."""
        fetched = found.host_slots[found.host_slots >= 0].tolist()
        assert len(set(fetched)) == len(fetched), "fetched twice"
        self._check_state(before, ready, FLOOR, set(fetched))  # type: ignore[arg-type]
        return set(fetched)


def prefetch(
    emulator: Emulator, case: InterCase, k: int, most: int, **how: int
) -> tuple[set[int], set[int]]:
    """Prefetch, check; fetch what is late, check. What came early, and what came in all."""
    slots = case.layer.model.device_slots
    ready = case.layer.choose(emulator, FLOOR, slots)
    before = copy.deepcopy(case.layer.model)
    found = emulator.inter_prefetch(
        case.scores, ints(case.lens), ints(case.request_rows), case.tables, case.shifts,
        case.fused_layer(FLOOR, slots), k=k, most=most, **how,
    )  # fmt: skip
    bounds = case.bounds(k)
    live = ints(case.lens) > 0
    same = (found.bounds == bounds) | (found.bounds.isnan() & bounds.isnan())
    assert same[live].all()
    early = case.check_fetched(found, ready, before)
    emulator.inter_fetch_late(found)
    fetched = case.check_fetched(found, ready, before)
    wanted = case.wanted(k)
    assert early <= fetched <= wanted and len(fetched) <= most
    if len(wanted) <= most:
        held = {owner for owner, _ in before.held.values()}
        assert fetched >= wanted - held, "left absent"
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
