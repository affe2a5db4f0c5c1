"""Inter-query prefetch fused into the CUDA prefill scores, on the GPU: same scores, right state."""

import copy
import random

import pytest
import torch
from tests.kernels.cache_model import layer_in_use
from tests.kernels.conftest import HAS_HOPPER
from tests.kernels.inter_model import InterCase
from tests.kernels.prefetch_model import ints
from tests.kernels.resident_model import LayerUnderTest

from echokv.kernels.cuda import fused, index_scores
from echokv.kernels.cuda import prefill_prefetch as inter
from echokv.memory.formats import IndexKeyFormat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU"),
]
CUDA = torch.device("cuda")
FMT = IndexKeyFormat(name="fp8", head_dim=128)
FLOOR = 4096


class OnGpu:
    """A case whose scores come from keys and queries."""

    def __init__(self, case: InterCase, heads: int = 64) -> None:
        self.case = case
        rows, num_pages = len(case.lens), case.layer.model.host_slots // 64
        pages = torch.empty((num_pages, FMT.page_bytes), dtype=torch.uint8, device=CUDA)
        keys = torch.randn((num_pages, 64 * 128), device=CUDA) * 64
        pages[:, : 64 * 128] = keys.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        pages[:, 64 * 128 :] = torch.full((num_pages, 64), 2.0**-6, device=CUDA).view(torch.uint8)
        self.arguments = (
            torch.randn((rows, heads, 128), device=CUDA, dtype=torch.bfloat16),
            torch.randn((rows, heads), device=CUDA), pages, FMT, case.tables.cuda(),
            ints(case.request_rows).cuda(), ints(case.lens).cuda(), max(case.lens),
        )  # fmt: skip
        self.plain = index_scores.index_scores(*self.arguments)
        case.scores = self.plain.cpu()
        for request in range(case.tables.shape[0]):
            row = case.request_rows.index(request)
            scores = case.scores[row, : case.lens[row]]
            case.shifts[request] = scores.topk(max(1, len(scores) // 20)).values[-1]

    def prefetch(self, k: int, most: int) -> set[int]:
        """Make the ready list, prefetch, check; fetch what is late, check. What came in all."""
        case = self.case
        ready = case.layer.choose(fused, FLOOR)
        before = copy.deepcopy(case.layer.model)
        scores, found = inter.prefill_scores_prefetch(
            *self.arguments, case.shifts.cuda(), case.fused_layer(FLOOR), k=k, most=most
        )
        assert torch.equal(scores, self.plain)
        case.check_bounds(found, k)
        early = case.check_fetched(found, ready, FLOOR, before)
        inter.fetch_late(found)
        fetched = case.check_fetched(found, ready, FLOOR, before)
        case.check_all(fetched, before, k, most)
        assert early <= fetched
        return fetched


def in_use(rng: random.Random, slots: int, blocks: int, row_bytes: int) -> LayerUnderTest:
    model = layer_in_use(rng, slots, 64 * blocks, rng.choice([0.2, 1.0]), FLOOR)
    return LayerUnderTest(model, CUDA, row_bytes)


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("row_bytes", [656, 1152, 2304])
def test_prefetch(row_bytes: int, heads: int) -> None:
    """Chunks that share blocks, single rows, rows shorter than k."""
    for seed in range(3):
        rng = random.Random(seed)
        chunks = [(5000, 200), (70, 1), (8191, 90), (9, 9), (64, 64)]
        case = InterCase(in_use(rng, 14_000, 300, row_bytes), chunks, rng, shared=20)
        assert OnGpu(case, heads).prefetch(200, 14_000)


def test_a_long_chunk_moves_most_of_a_context() -> None:
    rng = random.Random(1)
    case = InterCase(in_use(rng, 30_000, 400, 656), [(20_000, 500)], rng, shared=0)
    assert OnGpu(case).prefetch(2048, 25_000)


def test_few_places_and_few_slots() -> None:
    for seed in range(10):
        rng = random.Random(seed)
        case = InterCase(in_use(rng, 3000, 80, 48), [(2500, 100), (2400, 30)], rng, shared=30)
        OnGpu(case).prefetch(rng.choice([1, 64]), rng.choice([1, 20, 700]))


@pytest.mark.parametrize("shift", [0.0, -torch.inf, torch.inf, torch.nan, -1e30, 1e30])
def test_hostile_shifts(shift: float) -> None:
    rng = random.Random(5)
    case = InterCase(in_use(rng, 3000, 60, 656), [(1400, 70), (129, 3)], rng)
    on_gpu = OnGpu(case)
    case.shifts.fill_(shift)
    on_gpu.prefetch(60, 2000)
