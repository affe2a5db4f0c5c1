"""Prefetch fused into the CUDA indexer scores, on the GPU: same scores, the right state."""

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.kernels.cache_model import LayerModel, layer_in_use
from tests.kernels.conftest import HAS_HOPPER
from tests.kernels.prefetch_model import PrefetchCase, make_case
from tests.kernels.resident_model import LayerUnderTest

from echokv.cache.manager import CacheManager
from echokv.kernels.cuda import fused, prefetch
from echokv.kernels.cuda import index_scores as scoring
from echokv.kernels.cuda.fetch_listed import fetch_listed
from echokv.kernels.cuda.index_scores import index_scores
from echokv.kernels.fused_layer import TOTALS, FusedLayer
from echokv.kernels.prefetch_args import CandidateLists, Candidates, LayerPrefetch
from echokv.kernels.reference.name_rows import positions_to_host_slots
from echokv.kernels.registry import load_kernels
from echokv.memory.formats import IndexKeyFormat
from echokv.memory.pools import DevicePool, HostPool
from echokv.memory.slots import HostSlots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU"),
]
CUDA = torch.device("cuda")
FMT = IndexKeyFormat(name="fp8", head_dim=128)
FLOOR = 4096


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=CUDA)


class OnGpu:
    """A prefetch case whose scores come from keys and queries.

    Args:
        case: requests over a layer; its scores are overwritten.
        heads: of the query.
        late: whether rows are fetched when all scores are there, not meanwhile.
    """

    def __init__(self, case: PrefetchCase, heads: int = 64, *, late: bool = False) -> None:
        self.case, self.late = case, late
        load_kernels("cuda", CUDA)  # nobody waits for a kernel that is still being compiled
        rows, num_pages = len(case.lens), case.layer.model.host_slots // 64
        pages = torch.empty((num_pages, FMT.page_bytes), dtype=torch.uint8, device=CUDA)
        keys = torch.randn((num_pages, 64 * 128), device=CUDA) * 64
        pages[:, : 64 * 128] = keys.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        pages[:, 64 * 128 :] = torch.full((num_pages, 64), 2.0**-6, device=CUDA).view(torch.uint8)
        self.arguments = (
            torch.randn((rows, heads, 128), device=CUDA, dtype=torch.bfloat16),
            torch.randn((rows, heads), device=CUDA), pages, FMT, case.tables.cuda(),
            ints(case.request_rows), ints(case.lens), max(case.lens),
        )  # fmt: skip
        self.plain = index_scores(*self.arguments)
        self.lists = prefetch.candidate_lists(CUDA)
        self.side = torch.cuda.Stream(priority=-1)
        case.scores = self.plain.cpu()

    def set_thresholds(self, share: float) -> None:
        """So that about this share of each row's positions are candidates."""
        for row, length in enumerate(self.case.lens):
            if length and self.case.request_slots[row] >= 0:
                scores = self.case.scores[row, :length]
                threshold = scores.topk(max(1, int(length * share))).values[-1]
                self.case.thresholds[self.case.request_slots[row]] = threshold

    def prefetch(self, most: int, rows_per_unit: int, least: int, *, free: int = 9000) -> set[int]:
        """Make the ready list, with so many free slots at least, prefetch, check. What came in."""
        case, under_test = self.case, self.case.layer
        ready = under_test.choose(fused, FLOOR, free)
        before = copy.deepcopy(under_test.model)
        ahead = case.prefetch(
            FLOOR, self.lists, most=most, rows_per_unit=rows_per_unit, least=least
        )
        put_off: list[tuple[Any, CandidateLists]] = []
        fetch = (lambda *how: put_off.append(how)) if self.late else fetch_listed
        with patch.object(scoring, "fetch_listed", fetch):
            scores = prefetch.index_scores_prefetch(*self.arguments, ahead, self.fork)
        for how in put_off:
            fetch_listed(*how)
        torch.cuda.current_stream().wait_stream(self.side)
        assert torch.equal(scores, self.plain)
        return case.check(before, ready, FLOOR, ahead)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """The second stream, after all that the first has been given."""
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            yield


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("row_bytes", [656, 1152, 2304])
@pytest.mark.parametrize("late", [False, True])
def test_prefetch(row_bytes: int, heads: int, late: bool) -> None:
    """Requests that share blocks, padding, one without prediction and one that may fetch none."""
    for seed in range(3):
        rng = random.Random(seed)
        model = layer_in_use(rng, 9000, 64 * 600, rng.choice([0.2, 1.0]), FLOOR)
        under_test = LayerUnderTest(model, CUDA, row_bytes)
        lens = [5000, 0, 8191, 63, 1, 64, 4097, 2048, 0, 6000]
        on_gpu = OnGpu(make_case(rng, under_test, lens, shared_blocks=20), heads, late=late)
        case = on_gpu.case
        case.limits[case.request_slots[6]] = 0
        case.request_slots[7] = -1
        on_gpu.set_thresholds(0.05)
        case.thresholds[case.request_slots[2]] = torch.inf
        assert on_gpu.prefetch(300, 65536 // 20, 3) or not late  # launches may be far apart


def test_everything_is_found_where_nothing_is_in_a_hurry() -> None:
    """Few candidates and ample budgets: all that are absent, once all of them are listed."""
    rng = random.Random(1)
    under_test = LayerUnderTest(layer_in_use(rng, 9000, 64 * 900, 0.3, FLOOR), CUDA, 656)
    on_gpu = OnGpu(make_case(rng, under_test, [20_000, 300, 9_999]), late=True)
    on_gpu.set_thresholds(0.01)
    held = {owner for owner, _ in under_test.model.held.values()}
    want = set().union(*(on_gpu.case.candidates(row) for row in range(3))) - held
    assert on_gpu.prefetch(500, 0, 500, free=0) == want
    assert on_gpu.prefetch(500, 0, 500, free=0) == set()


def test_shared_rows_move_once_and_budgets_hold() -> None:
    """Many requests over the same blocks, more candidates than budget, few slots."""
    for seed in range(10):
        rng = random.Random(seed)
        under_test = LayerUnderTest(
            layer_in_use(rng, 700, 64 * 80, rng.choice([0.5, 1.0]), FLOOR), CUDA
        )
        on_gpu = OnGpu(make_case(rng, under_test, [64 * 70 - row for row in range(30)], 70))
        on_gpu.set_thresholds(rng.choice([0.01, 0.3]))
        on_gpu.prefetch(rng.choice([1, 20]), 0, 20, free=rng.choice([5, 300]))


@pytest.mark.parametrize("threshold", [0.0, -torch.inf, torch.inf, torch.nan, -1e30, 1e30])
@pytest.mark.parametrize("most, rows_per_unit, least", [(1, 0, 0), (1, 0, 9), (50, 2**31, 2**31)])
def test_hostile_predictions_and_budgets(
    threshold: float, most: int, rows_per_unit: int, least: int
) -> None:
    rng = random.Random(5)
    under_test = LayerUnderTest(layer_in_use(rng, 300, 64 * 60, 0.9, FLOOR), CUDA)
    on_gpu = OnGpu(make_case(rng, under_test, [1400, 0, 129], 1))
    on_gpu.case.thresholds.fill_(threshold)
    on_gpu.prefetch(most, rows_per_unit, least)


def test_a_thousand_replays_under_eviction_pressure() -> None:
    """Hostile predictions, shared blocks and a pool of the least size, in one captured step.

    Rows are still being fetched while the selection is made resident. Every replay: the scores are
    those without prefetch, and each selected row is where it is said to be, byte for byte.
    """
    rng = random.Random(9)
    rows, k, most, lens = 6, 64, 24, [700, 0, 1500, 64, 1499, 1000]
    least_pool = rows * k + rows * most
    host = HostPool(1, 64 * 80, 656, CUDA)
    host.rows.random_(0, 256)
    manager = CacheManager(load_kernels("cuda", CUDA), host, DevicePool(1, least_pool, 656, CUDA))
    ids = torch.randperm(60).to(torch.int32)  # eight blocks of one prefix for all, and some more
    tables = torch.stack([ids[[*range(8), *rng.sample(range(8, 60), 16)]] for _ in range(rows)])
    under_test = LayerUnderTest(LayerModel(4, 64 * 80), CUDA)
    case = PrefetchCase(under_test, lens, tables, list(range(rows)), rng)
    on_gpu = OnGpu(case)
    query, lens_on_gpu, request_rows = (on_gpu.arguments[at] for at in (0, 6, 5))
    truth = host.rows[0].cuda()
    request_slots = ints([0, -1, 1, 2, 3, 4])
    thresholds = torch.full((5,), torch.inf, device=CUDA)
    limits = torch.ones(5, dtype=torch.int32, device=CUDA)
    totals = torch.zeros((1, TOTALS), dtype=torch.int64, device=CUDA)
    wrong = torch.zeros(1, dtype=torch.int64, device=CUDA)
    found, kth_scores = Candidates.room(rows, most, CUDA), torch.empty(rows, device=CUDA)

    def step() -> None:
        manager.begin_step()
        ahead = LayerPrefetch(
            layer=fused_layer_of(manager, host, totals), request_slots=request_slots,
            thresholds=thresholds, limits=limits, lists=on_gpu.lists, found=found,
            kth_scores=kth_scores, rows_per_unit=0, least=most,
        )  # fmt: skip
        scores = prefetch.index_scores_prefetch(*on_gpu.arguments, ahead, manager.fork_ahead)
        tables = on_gpu.arguments[4]
        positions = prefetch.topk_rows(scores, lens_on_gpu, k, request_rows, tables, kth_scores)[0]
        wanted = positions_to_host_slots(positions, request_rows, tables)
        best = scores.gather(1, positions.clamp(min=0).long())
        wrong.add_((scores != index_scores(*on_gpu.arguments)).sum())
        slots = manager.make_resident(0, HostSlots(wanted), best)
        wrong.add_((slots < 0).ne(wanted < 0).sum())
        taken = manager.rows(0)[slots.clamp(min=0).long()]
        differs = (taken != truth[wanted.clamp(min=0).long()]).any(dim=2)
        wrong.add_((differs & (wanted >= 0)).sum())

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    hostile = torch.tensor([torch.inf, torch.nan, -torch.inf, 0.0, 5.0, 10.0, 1e30], device=CUDA)
    for replay in range(1000):
        if replay % 3 == 0:
            query.normal_()
        thresholds.copy_(hostile[torch.randint(7, (5,), device=CUDA)])
        limits.random_(-1, 40)
        graph.replay()
        if replay % 250 == 249:
            manager.check()
            assert int(wrong) == 0, f"after {replay + 1} replays"
    assert int(totals[0, 1]) > 1000, "nothing was prefetched"
    assert int(totals[0, 1]) == int(totals[0, 4])
    host.close()


def fused_layer_of(manager: CacheManager, host: HostPool, totals: torch.Tensor) -> FusedLayer:
    """Layer 0 of a manager, with totals of its own."""
    state, ready = manager.state, manager._ready
    assert ready is not None
    layer = state.layer(0)
    return FusedLayer(
        floor=state.floor, device_free=layer.device_free, priority=layer.priority,
        device_to_host=layer.device_to_host, host_to_device=layer.host_to_device,
        ready=layer.slot_buffer, cursor=ready._cursors[0], barrier=ready._barrier,
        totals=totals[0], host_rows=host.rows[0], device_rows=manager.rows(0),
    )  # fmt: skip
