"""`make_resident` and `choose_victims` on the GPU, against the plain Python model."""

import random

import pytest
import torch
from tests.kernels.cache_model import LayerModel, layer_in_use
from tests.kernels.resident_model import LayerUnderTest, check_new_rows, selection

from echokv.kernels.cuda import fused, recall
from echokv.kernels.fused_layer import FusedLayer

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("slots", [1, 8191, 20_000])
@pytest.mark.parametrize("floor", [8, 9000, 2**31 - 8])
def test_choose_victims_lists_the_oldest_first(slots: int, floor: int) -> None:
    rng = random.Random(slots)
    for share in (0.0, 0.6, 1.0):
        under_test = LayerUnderTest(layer_in_use(rng, slots, 2 * slots, share, floor), CUDA)
        under_test.choose(fused, floor)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("lanes", [None, 4, 32])
@pytest.mark.parametrize("row_bytes", [656, 1152, 40, 1568])
def test_make_resident(share: float, lanes: int | None, row_bytes: int) -> None:
    """Several steps, each with new rows and old ones, duplicates, and -1 at the ends."""
    rng = random.Random(f"{share} {lanes} {row_bytes}")
    floor = 4096
    under_test = LayerUnderTest(layer_in_use(rng, 5000, 9000, share, floor), CUDA, row_bytes)
    for step in range(3):
        under_test.choose(fused, floor)
        owners = [owner for owner, _ in under_test.model.held.values()]
        pool = rng.sample(range(9000), 1500) + rng.sample(owners, min(1500, len(owners)))
        wanted = selection(rng, pool, 7, 1029)
        scores = torch.randn(wanted.shape).masked_fill(wanted < 0, torch.nan)
        under_test.fetch(fused, wanted, scores, floor, lanes=lanes)
        floor += 8 * (step + 1)


def test_make_resident_over_several_tiles_a_block() -> None:
    """More rows than resident blocks, so that entries wait in device_slots."""
    rng = random.Random(5)
    under_test = LayerUnderTest(layer_in_use(rng, 3000, 5000, 0.8, 4096), CUDA)
    under_test.choose(fused, 4096)
    wanted = selection(rng, rng.sample(range(5000), 2900), 700, 70)
    under_test.fetch(fused, wanted, torch.randn(wanted.shape), 4096)


def test_make_resident_in_many_orders() -> None:
    """Few slots, much contention: rows on the ready list are selected, misses are shared."""
    for seed in range(100):
        rng = random.Random(seed)
        under_test = LayerUnderTest(layer_in_use(rng, 90, 120, rng.choice([0.5, 1.0]), 800), CUDA)
        under_test.choose(fused, 800)
        pool = rng.sample(range(120), rng.choice([3, 40, 88]))
        wanted = selection(rng, pool, 5, 133)
        under_test.fetch(fused, wanted, torch.randn(wanted.shape), 800)


@pytest.mark.parametrize("row_bytes", [656, 1152, 40, 1568])
@pytest.mark.parametrize("count", [13, 70, 1500])
def test_append_rows(row_bytes: int, count: int) -> None:
    """New rows and rewritten ones, some of them next on the ready list; then a selection."""
    for seed in range(2):
        rng = random.Random(seed)
        share = rng.choice([0.5, 1.0])
        under_test = LayerUnderTest(layer_in_use(rng, 3000, 6000, share, 800), CUDA, row_bytes)
        under_test.choose(fused, 800)
        owners = [owner for owner, _ in under_test.model.held.values()]
        new = list({*rng.sample(range(6000), count), *rng.sample(owners, count // 3)})
        under_test.append(fused, [-1, *new, -1], 800)
        wanted = selection(rng, [*new, *rng.sample(range(6000), 600)], 3, 300)
        under_test.fetch(fused, wanted, torch.rand(wanted.shape), 800)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("row_bytes", [656, 1152, 40])
@pytest.mark.parametrize("count", [1, 13, 64])
def test_make_resident_with_new_rows(beside: bool, row_bytes: int, count: int) -> None:
    """New rows and rewritten ones, selected or not, next to leave or not; few and many entries."""
    for seed in range(12):
        rng = random.Random(seed)
        share = rng.choice([0.5, 1.0])
        under_test = LayerUnderTest(layer_in_use(rng, 3000, 6000, share, 800), CUDA, row_bytes)
        under_test.choose(fused, 800)
        for floor in (800, 808):
            owners = [owner for owner, _ in under_test.model.held.values()]
            pool = [*rng.sample(range(6000), 600), *rng.sample(owners, 600)]
            new = rng.sample(sorted(set(pool)), count)
            wanted = selection(rng, pool, *rng.choice([(1, 900), (13, 2048), (60, 2048)]))
            under_test.fetch(
                fused, wanted, torch.randn(wanted.shape), floor, new=new, beside=beside
            )
            under_test.begin(fused, floor + 8, 1300)


@pytest.mark.parametrize("rows", [1, 30, 700])
def test_who_leaves_for_new_rows(rows: int) -> None:
    """By one block, by several, and by blocks of several tiles."""
    for seed in range(40):
        check_new_rows(fused, CUDA, seed, rows=rows)


def test_more_new_rows_than_a_block_takes_are_refused() -> None:
    under_test = LayerUnderTest(LayerModel(90, 90), CUDA)
    wanted = torch.zeros((1, 4), dtype=torch.int32)
    with pytest.raises(ValueError, match="65 new rows in one launch; at most 64"):
        under_test.fetch(fused, wanted, torch.zeros(1, 4), 8, new=list(range(65)))


def test_every_entry_the_same_missing_row() -> None:
    under_test = LayerUnderTest(LayerModel(4, 9, {0: (3, 1)}), CUDA)
    under_test.choose(fused, 8)
    wanted = torch.full((13, 2048), 5, dtype=torch.int32)
    under_test.fetch(fused, wanted, torch.zeros(wanted.shape), 8)


def test_int32_offsets_of_neither_pool_overflow() -> None:
    """Rows past byte 2^32 of both pools: recalled, appended, gathered."""
    slots = 7_000_001
    host_rows = torch.empty(slots * 656, dtype=torch.uint8, pin_memory=True).view(slots, 656)
    far = torch.tensor([0, 3_276_800, 3_728_271, 6_547_206, slots - 1], dtype=torch.int32)
    host_rows[far.long()] = torch.randint(0, 256, (5, 656), dtype=torch.uint8)

    def full(size: int, value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((size,), value, dtype=dtype, device=CUDA)

    device_rows = torch.zeros(slots, 656, dtype=torch.uint8, device=CUDA)
    ready = full(slots, -1)
    ready[:5] = torch.tensor([slots - 1, 6_600_000, 3_300_000, 3_800_000, 0], device=CUDA)
    ready[5:10] = torch.tensor([slots - 2, 6_600_001, 3_300_001, 3_800_001, 1], device=CUDA)
    layer = FusedLayer(
        floor=full(1, 8), device_free=full(slots, 1, torch.uint8), priority=full(slots, -1),
        device_to_host=full(slots, -1), host_to_device=full(slots, -1), ready=ready,
        cursor=torch.tensor([0, 0, slots, 8, 0], dtype=torch.int32, device=CUDA),
        barrier=full(1, 0), totals=full(5, 0, torch.int64), host_rows=host_rows,
        device_rows=device_rows,
    )  # fmt: skip
    found = full(5, -77).view(1, 5)
    fused.make_resident(far.cuda().view(1, 5), torch.zeros(1, 5, device=CUDA), layer, found)
    assert sorted(found[0].tolist()) == sorted(ready[:5].tolist())
    assert torch.equal(device_rows[found[0].long()].cpu(), host_rows[far.long()])

    new = (far - 2).clamp(min=1)
    rows = torch.randint(0, 256, (5, 656), dtype=torch.uint8)
    fused.append_rows(new.cuda(), rows.cuda(), layer)
    where = layer.host_to_device[new.long().cuda()]
    assert sorted(where.tolist()) == sorted(ready[5:10].tolist())
    assert torch.equal(device_rows[where.long()].cpu(), rows)
    assert torch.equal(host_rows[new.long()], rows)

    recall.recall(far.cuda(), full(1, 5), ready, host_rows, device_rows)
    assert torch.equal(device_rows[ready[:5].long()].cpu(), host_rows[far.long()])
