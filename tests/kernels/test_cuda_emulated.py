"""The CUDA kernels' logic without a GPU: the same sources, threads as fibers in random order."""

import random
from typing import Any

import pytest
import torch
from tests.kernels import cuda_emulator
from tests.kernels.cache_model import LayerModel, layer_in_use
from tests.kernels.cuda_emulator import Emulator
from tests.kernels.resident_model import LayerUnderTest, check_new_rows, selection
from tests.kernels.test_topk import DISTRIBUTIONS, oracle

from echokv.kernels.fused_layer import STALE, TOUCHED, NewRows
from echokv.kernels.reference.name_rows import name_rows

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(cuda_emulator.COMPILER is None, reason="needs g++")


def check_topk(emulator: Emulator, scores: torch.Tensor, lens: list[int], k: int, **plan: Any):
    """Named, against Python's sort and the reference's names; not named, the same."""
    (rows, width), context = scores.shape, torch.tensor(lens, dtype=torch.int32)
    tables = torch.randperm(3 * (width // 64 + 1)).to(torch.int32).view(3, -1)
    owners = torch.arange(rows, dtype=torch.int32) * 2 % 3
    positions, kth, *named = emulator.topk_rows(scores, context, k, owners, tables, **plan)
    for row, length in enumerate(lens):
        want, want_kth = oracle(scores[row, : max(0, length)].tolist(), k)
        assert positions[row].tolist() == want, f"row {row} of length {length}"
        assert kth[row].item() == want_kth
        assert kth[row].item() != 0 or not torch.signbit(kth[row])
    for got, names in zip(named, name_rows(positions, scores, owners, tables), strict=True):
        assert torch.equal(got.view(torch.int32), names.view(torch.int32))
    plain = emulator.topk_rows(scores, context, k, owners, tables, named=False, **plan)
    assert torch.equal(plain[0], positions) and torch.equal(plain[1], kth)
    assert (plain[2] == -77).all() and plain[3].isnan().all()


@pytest.mark.parametrize(
    "name, listed",
    [*((name, listed) for name in DISTRIBUTIONS for listed in (0, 1024)),
     ("normal", 512), ("normal", 3072), ("all equal", 3072)],
)  # fmt: skip
def test_topk_equals_sorting(emulator: Emulator, name: str, listed: int) -> None:
    """A row on a cluster of two: by digits; by lists too short, long enough, and of everything."""
    k, width = 300, 3001  # rows start at any multiple of four bytes
    lens = [k - 1, k, 3001, 2047, 4000]
    scores = torch.stack([DISTRIBUTIONS[name](width) for _ in lens])
    for row, length in enumerate(lens):
        scores[row, length:] = torch.nan if row % 2 else torch.inf
    check_topk(emulator, scores, lens, k, cluster=2, cached=512, listed=listed)


@pytest.mark.parametrize("listed", [0, 2048])
@pytest.mark.parametrize("k", [1, 63, 2048, 5000])
@pytest.mark.parametrize("cluster", [1, 8])
def test_topk_on_clusters_of_any_size(
    emulator: Emulator, k: int, cluster: int, listed: int
) -> None:
    lens = [4100, 0, 70, -3]
    scores = torch.randn(len(lens), 4100).round(decimals=1)
    check_topk(emulator, scores, lens, k, cluster=cluster, cached=4100, listed=listed)


@pytest.mark.parametrize("listed", [0, 128])
@pytest.mark.parametrize("width", [1, 3, 5, 127])
def test_topk_of_narrow_rows(emulator: Emulator, width: int, listed: int) -> None:
    check_topk(
        emulator, torch.randn(3, width), [width, 1, 2], 2, cluster=2, cached=64, listed=listed
    )


@pytest.mark.parametrize("listed", [1024, 5000])
def test_topk_by_a_sample_finds_everything_it_should(emulator: Emulator, listed: int) -> None:
    """Winners in one place, in the sample's blind spots, and few distinct scores."""
    width, k = 6000, 64
    rows = torch.randn(4, width)  # lists, not keys, need most of the shared memory
    rows[0, 100:164] += 100
    rows[1, 1::2] = -torch.inf
    rows[2] = torch.arange(width) % 7
    rows[3] = torch.linspace(0, 1, width)
    check_topk(emulator, rows, [width] * 4, k, cluster=8, cached=0, listed=listed)


@pytest.mark.parametrize("where", [slice(0, 900), slice(3000, 3900), slice(5100, 6000)])
def test_topk_of_winners_that_one_block_has(emulator: Emulator, where: slice) -> None:
    """One list much longer than the others; ties among them."""
    width, k = 6000, 700
    rows = torch.randn(3, width)
    rows[:, where] += torch.tensor([[5.0], [50.0], [0.0]])
    rows[2, where] = 7.0  # and ties
    check_topk(emulator, rows, [width, 5950, width], k, cluster=8, cached=0, listed=1536)


@pytest.mark.parametrize("cluster", [1, 2])
def test_topk_of_outliers_in_a_row_listed_whole(emulator: Emulator, cluster: int) -> None:
    width, k = 1000, 200
    rows = torch.randn(5, width)
    rows[0, 7] = 1e30
    rows[1, 7], rows[1, 8] = 3e38, -3e38
    rows[2, ::3], rows[2, 1::3] = torch.inf, -torch.inf
    rows[3] = torch.where(torch.rand(width) < 0.5, torch.inf, torch.nan)
    rows[4] = 2.0
    check_topk(emulator, rows, [width] * 5, k, cluster=cluster, cached=0, listed=1024)


@pytest.mark.parametrize("slots", [1, 63, 1500, 2049])
@pytest.mark.parametrize("floor", [8, 4000, 9000, 2**31 - 8])
def test_choose_victims_lists_the_oldest_first(emulator: Emulator, slots: int, floor: int) -> None:
    rng = random.Random(slots)
    for share in (0.0, 0.6, 1.0):
        under_test = LayerUnderTest(layer_in_use(rng, slots, 2 * slots, share, floor), CPU)
        under_test.choose(emulator, floor)


def test_choose_victims_leaves_out_what_is_protected(emulator: Emulator) -> None:
    held = {0: (0, 80), 1: (1, 79), 2: (2, 85), 3: (3, 7)}
    assert LayerUnderTest(LayerModel(6, 9, held), CPU).choose(emulator, 80)[2:] == [3, 1]


def test_victims_of_the_next_step_may_be_protected_in_this_one(emulator: Emulator) -> None:
    held = {0: (0, 80), 1: (1, 79), 2: (2, 85), 3: (3, 7)}
    under_test = LayerUnderTest(LayerModel(4, 9, held), CPU)
    assert under_test.choose(emulator, 88) == [3, 1, 0, 2]


def test_a_new_list_serves_the_next_step(emulator: Emulator) -> None:
    """What the step before protected may go, what this one has written meanwhile may not."""
    for seed in range(20):
        rng = random.Random(seed)
        under_test = LayerUnderTest(layer_in_use(rng, 40, 90, rng.choice([0.7, 1.0]), 800), CPU)
        under_test.choose(emulator, 800)
        under_test.append(emulator, rng.sample(range(90), 30), 800)
        under_test.choose(emulator, 808)
        new = rng.sample(range(90), 8)
        under_test.append(emulator, new, 808)
        wanted = torch.tensor([rng.sample(range(90), 32), [*new, *rng.sample(range(90), 24)]])
        wanted[1, 8:] = wanted[0, 8:]
        under_test.fetch(emulator, wanted.to(torch.int32), torch.rand(2, 32), 808)


@pytest.mark.parametrize("most_rows", [8, 30])
def test_a_list_serves_as_many_steps_as_it_has_names_for(
    emulator: Emulator, most_rows: int
) -> None:
    """`begin` holds what is left of it against the pool, at every step of many."""
    anew = []
    for seed in range(12):
        rng = random.Random(seed)
        under_test = LayerUnderTest(layer_in_use(rng, 60, 150, rng.choice([0.3, 1.0]), 800), CPU)
        warm = rng.sample(range(150), 25)
        for step in range(12):
            floor = 800 + 8 * step
            free, partly = rng.choice([0, 2, 60]), rng.random() < 0.5
            anew.append(under_test.begin(emulator, floor, most_rows, free, partly=partly))
            under_test.append(emulator, [rng.randrange(150)], floor)
            warm[rng.randrange(25)] = rng.randrange(150)
            wanted = torch.tensor([rng.sample(warm, (most_rows - 1) // 2)] * 2, dtype=torch.int32)
            wanted[1, -2:] = torch.tensor(rng.sample(range(150), 2))
            under_test.fetch(emulator, wanted, torch.rand(wanted.shape), floor)
    kept = 1 - sum(anew) / len(anew)
    assert kept > (0.5 if most_rows == 8 else 0.05), kept


def test_a_list_is_made_anew_when_it_is_stale_or_the_clock_went_back(emulator: Emulator) -> None:
    under_test = LayerUnderTest(layer_in_use(random.Random(1), 40, 90, 0.9, 800), CPU)
    assert under_test.begin(emulator, 800, 5)
    assert not under_test.begin(emulator, 808, 5)
    under_test.cursor[TOUCHED] = STALE
    assert under_test.begin(emulator, 808, 5)
    levels = under_test.tensors.priority
    levels.copy_(torch.where(levels >= 0, levels.clamp(max=15), levels))  # as a rebase does
    under_test.model.held = under_test._held()
    assert under_test.begin(emulator, 16, 5)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("lanes", [4, 32])
@pytest.mark.parametrize("row_bytes", [16, 656, 40, 1568])
def test_make_resident(emulator: Emulator, share: float, lanes: int, row_bytes: int) -> None:
    """Several steps, each with new rows and old ones, duplicates, and -1 at the ends."""
    rng = random.Random(f"{share} {lanes} {row_bytes}")
    floor = 4096
    model = layer_in_use(rng, 400, 900, share, floor)
    under_test = LayerUnderTest(model, CPU, row_bytes)
    for step in range(4):
        under_test.choose(emulator, floor)
        owners = [owner for owner, _ in model.held.values()]
        pool = rng.sample(range(900), 60) + rng.sample(owners, min(60, len(owners)))
        wanted = selection(rng, pool, 3, 150)
        scores = torch.randn(wanted.shape).masked_fill(wanted < 0, torch.nan)
        under_test.fetch(emulator, wanted, scores, floor, lanes=lanes)
        floor += 8 * (step + 1)


def test_make_resident_in_many_orders(emulator: Emulator) -> None:
    """Few slots, much contention: rows on the ready list are selected, misses are shared."""
    for seed in range(60):
        rng = random.Random(seed)
        model = layer_in_use(rng, 40, 60, rng.choice([0.5, 1.0]), 800)
        under_test = LayerUnderTest(model, CPU)
        under_test.choose(emulator, 800)
        pool = rng.sample(range(60), rng.choice([3, 20, 38]))
        wanted = selection(rng, pool, 5, 33)
        scores = torch.randn(wanted.shape)
        under_test.fetch(emulator, wanted, scores, 800, lanes=rng.choice([4, 8, 32]))


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("row_bytes", [656, 40])
def test_make_resident_with_new_rows(emulator: Emulator, beside: bool, row_bytes: int) -> None:
    """New rows and rewritten ones, selected or not, next to leave or not; few slots."""
    for seed in range(40):
        rng = random.Random(seed)
        under_test = LayerUnderTest(
            layer_in_use(rng, 80, 200, rng.choice([0.5, 1.0]), 800), CPU, row_bytes
        )
        under_test.choose(emulator, 800)
        owners = [owner for owner, _ in under_test.model.held.values()]
        new = list({*rng.sample(range(200), rng.choice([0, 1, 13, 30])), *rng.sample(owners, 3)})
        others = rng.sample([slot for slot in range(200) if slot not in new], 30)
        wanted = selection(rng, [*rng.sample(new, len(new) // 2), *others], 5, 33)
        lanes, floor = rng.choice([4, 8, 32]), 800
        under_test.fetch(
            emulator, wanted, torch.randn(wanted.shape), floor,
            new=[-1, *new], beside=beside, lanes=lanes,
        )  # fmt: skip
        under_test.begin(emulator, 808, 60, rng.choice([0, 9, 80]), partly=rng.random() < 0.5)
        again = rng.sample(range(200), 30)
        wanted = selection(rng, again, 5, 33)
        under_test.fetch(
            emulator, wanted, torch.randn(wanted.shape), 808, new=again[:9], beside=beside
        )


@pytest.mark.parametrize("lanes", [4, 32])
def test_who_leaves_for_new_rows(emulator: Emulator, lanes: int) -> None:
    """By blocks that have a tile each, and by two that have one after the other."""
    for seed in range(60):
        most_blocks = 8 if seed % 2 else 2
        check_new_rows(emulator, CPU, seed, rows=9, lanes=lanes, most_blocks=most_blocks)


def test_new_rows_without_enough_room(emulator: Emulator) -> None:
    """The last of them stay absent, for those too who select them, and everything else leaves."""
    for seed in range(20):
        held = {slot: (slot, 700) for slot in range(3, 8)}
        under_test = LayerUnderTest(LayerModel(8, 90, held), CPU)
        under_test.choose(emulator, 800)
        new = torch.arange(40, 52, dtype=torch.int32)
        wanted = torch.cat([torch.tensor([3], dtype=torch.int32), new]).repeat(3, 1)
        found, rows = torch.full_like(wanted, -77), torch.zeros(12, 48, dtype=torch.uint8)
        emulator.make_resident(
            wanted, torch.rand(wanted.shape), under_test.layer(800), found,
            new_rows=NewRows(new, rows), lanes=random.Random(seed).choice([4, 32]),
        )  # fmt: skip
        assert under_test.totals.tolist() == [8, 0, 4, 12, 7]
        assert all(torch.equal(row, found[0]) for row in found)
        assert sorted(found[0].tolist()) == [-1] * 5 + list(range(8))
        assert under_test.tensors.host_to_device[40:52].tolist() == found[0, 1:].tolist()


def test_new_rows_alone(emulator: Emulator) -> None:
    """Nobody selects anything; with and without an empty selection."""
    for rows in (0, 2):
        under_test = LayerUnderTest(layer_in_use(random.Random(1), 40, 90, 1.0, 800), CPU)
        under_test.choose(emulator, 800)
        wanted = torch.full((rows, 40), -1, dtype=torch.int32)
        new = random.Random(2).sample(range(90), 11)
        under_test.fetch(emulator, wanted, torch.zeros(wanted.shape), 800, new=new)


def test_make_resident_of_nothing_and_of_what_is_there(emulator: Emulator) -> None:
    rng = random.Random(3)
    model = layer_in_use(rng, 64, 64, 1.0, 800)
    under_test = LayerUnderTest(model, CPU)
    under_test.choose(emulator, 800)
    for wanted in (
        torch.full((2, 40), -1, dtype=torch.int32),
        torch.arange(64, dtype=torch.int32).view(2, 32),
    ):
        under_test.fetch(emulator, wanted, torch.zeros(wanted.shape), 800)


def test_make_resident_twice_in_a_step(emulator: Emulator) -> None:
    """What the first call took in is protected from the second."""
    rng = random.Random(9)
    under_test = LayerUnderTest(layer_in_use(rng, 100, 300, 1.0, 800), CPU)
    under_test.choose(emulator, 800)
    for start in (0, 100):
        wanted = torch.arange(start, start + 48, dtype=torch.int32).view(2, 24)
        under_test.fetch(emulator, wanted, torch.rand(wanted.shape), 800)


def test_make_resident_without_enough_room(emulator: Emulator) -> None:
    """Rows beyond the pool stay absent and break nothing: the manager's check() counts them."""
    under_test = LayerUnderTest(LayerModel(20, 90), CPU)
    under_test.choose(emulator, 80)
    wanted = torch.arange(40, dtype=torch.int32).repeat(2, 1)
    found = torch.full_like(wanted, -77)
    emulator.make_resident(wanted, torch.rand(wanted.shape), under_test.layer(80), found)
    assert under_test.totals.tolist() == [0, 40, 0, 0, 20]
    assert torch.equal(found[0], found[1])
    assert sorted(found[0].tolist()) == [-1] * 20 + list(range(20))
    assert under_test.tensors.host_to_device[:40].tolist() == found[0].tolist()


@pytest.mark.parametrize("each", [7, cuda_emulator.RECALL_THREADS])
@pytest.mark.parametrize("row_bytes", [16, 656, 40, 1568])
def test_append_rows(
    emulator: Emulator, row_bytes: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New rows and rewritten ones, some of them next on the ready list; then a selection.

    By one block, and by several.
    """
    monkeypatch.setattr(emulator, "append_each", each)
    for seed in range(4):
        rng = random.Random(seed)
        under_test = LayerUnderTest(
            layer_in_use(rng, 60, 200, rng.choice([0.5, 1.0]), 800), CPU, row_bytes
        )
        under_test.choose(emulator, 800)
        owners = [owner for owner, _ in under_test.model.held.values()]
        new = list({*rng.sample(range(200), 20), *rng.sample(owners, 10)})
        under_test.append(emulator, [-1, *new, -1], 800)
        wanted = selection(rng, [*new, *rng.sample(range(200), 10)], 3, 30)
        under_test.fetch(emulator, wanted, torch.rand(wanted.shape), 800)
        under_test.choose(emulator, 808)
        under_test.append(emulator, rng.sample(range(200), 60), 808)  # all there is


@pytest.mark.parametrize("row_bytes", [656, 1152, 40, 4])
@pytest.mark.parametrize("count", [0, 1, 70])
def test_recall(emulator: Emulator, row_bytes: int, count: int) -> None:
    host_rows = torch.randint(0, 256, (100, row_bytes), dtype=torch.uint8)
    device_rows = torch.randint(0, 256, (90, row_bytes), dtype=torch.uint8)
    sources = torch.randperm(100)[:90].to(torch.int32)
    targets = torch.randperm(90).to(torch.int32)
    targets[count // 2 + 1 :] = -1
    want = device_rows.clone()
    done = min(count, count // 2 + 1)
    want[targets[:done].long()] = host_rows[sources[:done].long()]
    counter = torch.tensor([count], dtype=torch.int32)
    emulator.recall(sources, counter, targets, host_rows, device_rows)
    assert torch.equal(device_rows, want)
