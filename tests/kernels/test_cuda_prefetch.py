"""Prefetch fused into the CUDA indexer scores, on the GPU: same scores, the right state."""

import copy
import random

import pytest
import torch
from tests.kernels.conftest import HAS_HOPPER
from tests.kernels.prefetch_model import PrefetchCase, make_case
from tests.kernels.resident_model import LayerUnderTest
from tests.kernels.test_cuda_emulated import layer

from echokv.kernels.cuda import index_scores as cuda
from echokv.kernels.cuda import recall
from echokv.memory.formats import IndexKeyFormat

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
    """

    def __init__(self, case: PrefetchCase, heads: int = 64) -> None:
        self.case = case
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
        self.plain = cuda.index_scores(*self.arguments)
        case.scores = self.plain.cpu()

    def set_thresholds(self, share: float) -> None:
        """So that about this share of each row's positions are candidates."""
        for row, length in enumerate(self.case.lens):
            if length and self.case.request_slots[row] >= 0:
                scores = self.case.scores[row, :length]
                threshold = scores.topk(max(1, int(length * share))).values[-1]
                self.case.thresholds[self.case.request_slots[row]] = threshold

    def prefetch(self, most: int, rows_per_unit: int, least: int) -> set[int]:
        """Make the ready list, prefetch, check; fetch what is late, check. What came in all."""
        case, under_test = self.case, self.case.layer
        slots = under_test.model.device_slots
        ready = under_test.choose(recall, FLOOR, slots)
        before = copy.deepcopy(under_test.model)
        tensors = (ints(case.request_slots), case.thresholds.cuda(), case.enabled.cuda())
        layer_tensors = case.fused_layer(FLOOR, slots)
        scores, found = cuda.index_scores_prefetch(
            *self.arguments, *tensors, layer_tensors, most=most, rows_per_unit=rows_per_unit,
            least=least,
        )  # fmt: skip
        assert torch.equal(scores, self.plain)
        budgets = [case.budget(row, most, rows_per_unit, least) for row in range(len(case.lens))]
        early = case.check(before, ready, FLOOR, found, budgets)
        cuda.fetch_late(found)
        fetched = case.check(before, ready, FLOOR, found, budgets)
        assert fetched >= early and case.left == 0
        return fetched


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("row_bytes", [656, 1152, 2304])
def test_prefetch(row_bytes: int, heads: int) -> None:
    """Requests that share blocks, padding, one without prediction and one switched off."""
    for seed in range(3):
        rng = random.Random(seed)
        model = layer(rng, 9000, 64 * 600, rng.choice([0.2, 1.0]), FLOOR)
        under_test = LayerUnderTest(model, CUDA, row_bytes)
        lens = [5000, 0, 8191, 63, 1, 64, 4097, 2048, 0, 6000]
        on_gpu = OnGpu(make_case(rng, under_test, lens, shared_blocks=20), heads)
        case = on_gpu.case
        case.enabled[case.request_slots[6]] = 0
        case.request_slots[7] = -1
        on_gpu.set_thresholds(0.05)
        case.thresholds[case.request_slots[2]] = torch.inf
        assert on_gpu.prefetch(300, 65536 // 20, 3)


def test_everything_is_found_where_nothing_is_in_a_hurry() -> None:
    """Few candidates and ample budgets: all that are absent."""
    rng = random.Random(1)
    under_test = LayerUnderTest(layer(rng, 9000, 64 * 900, 0.3, FLOOR), CUDA, 656)
    on_gpu = OnGpu(make_case(rng, under_test, [20_000, 300, 9_999]))
    on_gpu.set_thresholds(0.01)
    held = {owner for owner, _ in under_test.model.held.values()}
    want = set().union(*(on_gpu.case.candidates(row) for row in range(3))) - held
    assert on_gpu.prefetch(500, 0, 500) == want
    assert on_gpu.prefetch(500, 0, 500) == set()


def test_shared_rows_move_once_and_budgets_hold() -> None:
    """Many requests over the same blocks, more candidates than budget, few slots."""
    for seed in range(10):
        rng = random.Random(seed)
        under_test = LayerUnderTest(layer(rng, 700, 64 * 80, rng.choice([0.5, 1.0]), FLOOR), CUDA)
        on_gpu = OnGpu(make_case(rng, under_test, [64 * 70 - row for row in range(30)], 70))
        on_gpu.set_thresholds(rng.choice([0.01, 0.3]))
        on_gpu.prefetch(rng.choice([1, 20]), 0, 20)


@pytest.mark.parametrize("threshold", [0.0, -torch.inf, torch.inf, torch.nan, -1e30, 1e30])
@pytest.mark.parametrize("most, rows_per_unit, least", [(1, 0, 0), (1, 0, 9), (50, 2**31, 2**31)])
def test_hostile_predictions_and_budgets(
    threshold: float, most: int, rows_per_unit: int, least: int
) -> None:
    rng = random.Random(5)
    under_test = LayerUnderTest(layer(rng, 300, 64 * 60, 0.9, FLOOR), CUDA)
    on_gpu = OnGpu(make_case(rng, under_test, [1400, 0, 129], 1))
    on_gpu.case.thresholds.fill_(threshold)
    on_gpu.prefetch(most, rows_per_unit, least)
