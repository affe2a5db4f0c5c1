"""Prefetch through the manager: who comes, who stays, what is counted, what it may never cost."""

from collections.abc import Callable

import pytest
import torch
from tests.cache.harness import Cache, make_cache

from echokv.errors import CapacityError


@pytest.fixture
def cache(new_cache: Callable[..., Cache]) -> Cache:
    """A hundred rows written in both layers, the last eight of them resident."""
    made = new_cache(device_slots=16, host_slots=128)
    for layer in range(2):
        made.append(layer, list(range(100)), keep=8)
    return made


def step(
    cache: Cache, ahead: list[list[int]], wanted: list[list[int]], layer: int = 0
) -> list[list[int]]:
    cache.manager.begin_step()
    cache.manager.prefetch(layer, cache.slots(ahead))
    found = cache.fetch(layer, wanted)
    cache.manager.end_step()
    cache.manager.check(cache.live())
    return found


def test_a_prefetched_row_is_not_recalled_again(cache: Cache) -> None:
    step(cache, [[3, 4], [4, -1]], [[3, 4, 92, -1], [5, 3, 93, 6]])
    counts = cache.manager.counters()[0]
    assert (counts.prefetched, counts.useful, counts.recalled) == (2, 2, 2)
    assert counts.selected == 6  # distinct
    other = cache.manager.counters()[1]
    assert (other.prefetched, other.useful, other.selected) == (0, 0, 0)


def test_a_row_that_is_recalled_ahead_was_useful_too(cache: Cache) -> None:
    """A prefetch is judged when its layer has made its selection resident, wherever that ran."""
    manager, wanted = cache.manager, cache.slots([[3, 4, 92, 5]])
    manager.begin_step()
    with manager.side.fork():
        manager.prefetch(0, cache.slots([[3, 4, 6]]))
    places = manager.recall_ahead(0, wanted, torch.zeros(wanted.shape, device=cache.device))
    manager.wait()
    assert (places >= 0).all()
    manager.end_step()
    counts = manager.counters()[0]
    assert (counts.prefetched, counts.useful, counts.recalled) == (3, 2, 1)
    manager.check(cache.live())


def test_what_was_put_off_is_done_when_the_last_layer_has_selected(cache: Cache) -> None:
    """Beside what follows, and so after all that it reads of the step."""
    manager, done = cache.manager, list[bool]()
    manager.begin_step()
    manager.side.later(lambda: done.append(True))
    for layer in range(2):
        cache.fetch(layer, [[3, 4, 92, 5]])
        assert not done
        manager.settle(layer)
    assert done == [True]
    manager.end_step()
    assert done == [True]


def test_what_is_resident_is_neither_moved_nor_counted(cache: Cache) -> None:
    before = cache.resident(0)
    assert set(before) == set(range(92, 100))
    step(cache, [[92, 93, 92, -1]], [[1, 92, -1, -1]])
    counts = cache.manager.counters()[0]
    assert (counts.prefetched, counts.useful, counts.recalled) == (0, 0, 1)
    assert cache.resident(0)[92] == before[92]


def test_waste_is_counted_and_leaves_first(cache: Cache) -> None:
    """Rows prefetched for nothing stand at the floor: below all that was selected in the step."""
    step(cache, [[1, 2, 3, 4]], [[3, 50, 51, 52]])
    counts = cache.manager.counters()[0]
    assert (counts.prefetched, counts.useful) == (4, 1)
    step(cache, [[-1]], [list(range(60, 71))])
    assert {3, 50, 51, 52} <= cache.resident(0).keys()
    assert not {1, 2, 4} <= cache.resident(0).keys()


def test_prefetched_written_and_selected_rows_share_the_pool_to_the_last_slot(
    cache: Cache,
) -> None:
    cache.manager.begin_step()
    cache.append(0, [100, 101])
    cache.manager.prefetch(0, cache.slots([[1, 2, 3], [4, 5, 6]]))
    cache.fetch(0, [[10, 11, 12, 100], [13, 14, 15, 16]])  # 7 absent ones beside 8
    assert {*range(1, 7), *range(10, 17), 100, 101} == {
        slot for slot in cache.resident(0) if slot < 92 or slot >= 100
    }
    cache.manager.end_step()
    cache.manager.check(cache.live())


def test_a_prefetch_may_displace_what_the_selection_wants(cache: Cache) -> None:
    """It is fetched again: an eviction costs time, not correctness."""
    step(cache, [list(range(14))], [[92, 93, -1]])
    assert cache.manager.counters()[0].recalled == 2
    with pytest.raises(CapacityError, match="prefetching 17 rows"):
        cache.manager.prefetch(0, cache.slots([list(range(17))]))


def test_several_layers_settle_one_after_the_other(cache: Cache) -> None:
    """Counting a layer's useful rows waits until the next one has started."""
    cache.manager.begin_step()
    for layer, wanted in ((0, [1, 2, 50]), (1, [1, 60, 61])):
        cache.manager.prefetch(layer, cache.slots([[1, 2, 3]]))
        cache.fetch(layer, [wanted])
    cache.manager.end_step()
    useful = [counts.useful for counts in cache.manager.counters()]
    assert useful == [2, 1]
    cache.manager.end_step()
    assert [counts.useful for counts in cache.manager.counters()] == useful


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton-cuda", "cuda-cuda"])
def test_a_captured_step_prefetches_beside_the_main_stream(name: str) -> None:
    """Captured with nothing but -1; replayed with candidates and evictions in every step."""
    if name == "cuda-cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    cache = make_cache(name, layers=3, device_slots=60, host_slots=256, row_bytes=656)
    manager, device = cache.manager, cache.device
    for layer in range(3):
        cache.append(layer, list(range(200)))
    ahead = cache.slots([[-1] * 6] * 4)
    wanted, scores = cache.slots([[-1] * 8] * 4), torch.zeros(4, 8, device=device)

    def run() -> list[torch.Tensor]:
        manager.begin_step()
        found = []
        for layer in range(3):
            with manager.side.fork(ahead):
                manager.prefetch(layer, ahead)
            found.append(manager.make_resident(layer, wanted, scores))
        manager.end_step()
        return found

    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        run()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        wanted.copy_(torch.randint(-1, 200, (4, 8), generator=generator))
        guesses = torch.randint(-1, 200, (4, 6), generator=generator)
        guesses[:, :3] = wanted[:, :3].cpu()
        ahead.copy_(guesses)
        scores.normal_()
        graph.replay()
        torch.cuda.synchronize()
        asked = wanted.flatten().tolist()
        for layer, places in enumerate(found):
            rows = manager.rows(layer).cpu()
            for slot, place in zip(asked, places.flatten().tolist(), strict=True):
                assert (slot < 0) == (place < 0)
                if slot >= 0:
                    assert bytes(rows[place].tolist()) == cache.truth[layer, slot]
        manager.check(cache.live())
    for counts in manager.counters():
        assert counts.prefetched > counts.useful > 0
        assert counts.recalled > 0 and counts.evicted > 0
    cache.close()
