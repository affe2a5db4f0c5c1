"""The offloaded cache: what is asked for is there, byte for byte; what is protected stays."""

from collections.abc import Callable

import pytest
import torch
from tests.cache.harness import POISON, Cache

from echokv.cache.state import CacheInvariantError
from echokv.errors import CapacityError

NewCache = Callable[..., Cache]


def filled(new_cache: NewCache, tokens: int = 50, **sizes: int) -> Cache:
    """A cache whose first `tokens` host slots are written, the last few of them resident."""
    cache = new_cache(**sizes)
    cache.manager.begin_step()
    for layer in range(cache.manager.state.num_layers):
        cache.append(layer, list(range(tokens)))
    return cache


def test_rows_come_back_from_host(new_cache: NewCache) -> None:
    cache = filled(new_cache)
    for wanted in ([[0, 1, 2], [2, 3, 49]], [[49, 48, 47], [0, 20, 30]]):
        cache.manager.begin_step()
        for layer in range(2):
            cache.fetch(layer, wanted)
        cache.manager.check(cache.live())


def test_what_was_just_written_can_be_evicted_and_read_back(new_cache: NewCache) -> None:
    cache = filled(new_cache)
    cache.manager.begin_step()
    cache.append(0, [50])
    assert 50 in cache.resident(0)
    cache.manager.begin_step()
    cache.fetch(0, [list(range(12))])  # the whole pool
    assert 50 not in cache.resident(0)
    cache.manager.begin_step()
    cache.fetch(0, [[50, 0]])
    cache.manager.check(cache.live())


def test_new_and_selected_rows_of_a_step_stay_through_it(new_cache: NewCache) -> None:
    """Invariant 4 with the pool exactly full of protected rows."""
    cache = filled(new_cache)
    cache.manager.begin_step()
    cache.append(0, [50, 51, 52])
    cache.fetch(0, [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert sorted(cache.resident(0)) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 50, 51, 52]


def test_only_the_kept_rows_become_resident(new_cache: NewCache) -> None:
    cache = new_cache()
    cache.manager.begin_step()
    cache.append(0, [5, 6, -1, 7, 8, -1], keep=3)
    assert sorted(cache.resident(0)) == [7, 8]
    cache.append(1, [5, 6], keep=0)
    assert cache.resident(1) == {}
    cache.fetch(1, [[5, 6]])
    cache.manager.check(cache.live())


def test_writing_a_slot_again_refreshes_its_resident_copy(new_cache: NewCache) -> None:
    cache = filled(new_cache)
    cache.manager.begin_step()
    cache.fetch(0, [[3, 4]])
    cache.append(0, [3, 4, 5], keep=1)
    cache.manager.check(cache.live())
    cache.fetch(0, [[3, 4, 5]])


def test_sentinels_duplicates_short_and_padded_rows(new_cache: NewCache) -> None:
    cache = filled(new_cache)
    cache.manager.begin_step()
    found = cache.fetch(0, [[1, 2, -1], [2, 2, 1], [-1, -1, -1], [-1, 7, -1]])
    assert found[0][1] == found[1][0] == found[1][1]
    assert cache.manager.counters()[0].selected == 3
    cache.manager.check(cache.live())


def test_a_shared_miss_is_fetched_once(new_cache: NewCache) -> None:
    """Invariant 7, and what the counters say about it."""
    cache = filled(new_cache)
    cache.manager.begin_step()
    cache.fetch(0, [[0, 1, 45], [1, 0, 45]])
    (first, second) = cache.manager.counters()
    assert (first.selected, first.recalled, first.evicted, first.resident) == (3, 2, 2, 12)
    assert (second.selected, second.recalled, second.evicted, second.resident) == (0, 0, 0, 12)


def test_selecting_new_rows_counts_as_hits(new_cache: NewCache) -> None:
    cache = new_cache()
    cache.manager.begin_step()
    cache.append(0, [3, 4, 5])
    cache.fetch(0, [[3, 4], [4, 5]])
    counts = cache.manager.counters()[0]
    assert (counts.selected, counts.recalled) == (3, 0)


def test_rows_that_are_put_off_come_with_the_selection(new_cache: NewCache) -> None:
    """Selected or not, and nothing that is selected leaves for them."""
    cache = filled(new_cache)
    cache.manager.begin_step()
    cache.append(0, [3, 50, -1, 51], until_selected=True)
    resident = sorted(cache.resident(0))[:6]
    cache.fetch(0, [[50, 1, 2, 3], [50, *resident[:3]]])
    assert {3, 50, 51, 1, 2, *resident[:3]} <= cache.resident(0).keys()
    cache.manager.check(cache.live())


@pytest.mark.parametrize(
    "then",
    ["begin_step", "end_step", "counters", "release", "append", "make_resident", "recall_ahead"],
)
def test_rows_that_are_put_off_are_written_whatever_comes_next(
    new_cache: NewCache, then: str
) -> None:
    cache = filled(new_cache)
    cache.manager.begin_step()
    cache.append(0, [50, 51], until_selected=True)
    match then:
        case "release":
            cache.release([49])
        case "append":
            cache.append(1, [50], until_selected=True)
        case "make_resident":
            cache.fetch(1, [[1, 2]])
        case "recall_ahead":
            wanted = cache.slots([[1, 2]])
            cache.manager.recall_ahead(1, wanted, torch.rand(1, 2, device=cache.device))
        case name:
            getattr(cache.manager, name)()
    cache.manager.end_step()
    assert {50, 51} <= cache.resident(0).keys()
    cache.manager.check(cache.live())
    cache.manager.begin_step()
    cache.fetch(0, [[50, 51]])


def test_least_recently_selected_goes_first_then_the_lowest_score(new_cache: NewCache) -> None:
    cache = filled(new_cache, device_slots=6)
    cache.manager.begin_step()
    cache.fetch(0, [[0, 1, 2]], torch.tensor([[0.1, 0.9, 0.5]], device=cache.device))
    cache.manager.begin_step()
    cache.fetch(0, [[3, 4, 5]], torch.tensor([[7.0, 5.0, 6.0]], device=cache.device))
    for new, gone in ((10, 0), (11, 2), (12, 1), (13, 4), (14, 5), (15, 3)):
        before = set(cache.resident(0))
        cache.manager.begin_step()
        cache.fetch(0, [[new]])
        assert before - set(cache.resident(0)) == {gone}


def test_the_smallest_pool(new_cache: NewCache) -> None:
    """A pool of exactly k slots serves one token at a time."""
    cache = filled(new_cache, device_slots=4)
    for wanted in ([0, 1, 2, 3], [3, 9, 0, 8], [49, -1, -1, -1], [1, 2, 3, 4]):
        cache.manager.begin_step()
        cache.append(0, [50])
        cache.manager.begin_step()
        cache.fetch(0, [wanted])
        cache.manager.check(cache.live())


def test_released_slots_are_absent_everywhere_and_reusable(new_cache: NewCache) -> None:
    """Invariant 5; poison in both pools shows any read of what was released."""
    cache = filled(new_cache)
    cache.release(list(range(40, 50)))
    for layer in range(2):
        assert not set(cache.resident(layer)) & set(range(40, 50))
    cache.manager.check(cache.live())
    cache.manager.begin_step()
    for layer in range(2):
        cache.append(layer, [41, 40])
        cache.fetch(layer, [[40, 41, 3]])
    cache.manager.check(cache.live())


def test_release_of_padding_and_duplicates(new_cache: NewCache) -> None:
    cache = filled(new_cache)
    cache.manager.release(torch.tensor([45, -1, 45, 46], dtype=torch.int64))
    assert not {45, 46} & set(cache.resident(1))
    cache.manager.check()


def test_priorities_survive_a_rebase_of_the_clock(new_cache: NewCache) -> None:
    cache = filled(new_cache, device_slots=6)
    cache.manager.state.clock.fill_((3 << 26) - 4)
    for wanted in ([0, 1], [2, 3], [4, 5], [20], [21], [22], [23]):
        cache.manager.begin_step()
        cache.fetch(0, [wanted])
    assert int(cache.manager.state.clock) < 2**28 - 1
    assert int(cache.manager.state.clock) == (1 << 27) + 3
    assert sorted(cache.resident(0)) == [4, 5, 20, 21, 22, 23]
    cache.manager.check(cache.live())


def test_live_rows_counts_the_fullest_layer(new_cache: NewCache) -> None:
    cache = filled(new_cache, device_slots=10)
    live = torch.zeros(64, dtype=torch.bool)
    live[:5] = True
    assert cache.manager.live_rows(live) == 0  # the last ten of 50 are resident
    cache.manager.begin_step()
    cache.fetch(1, [[0, 1, 9, -1]])
    assert cache.manager.live_rows(live) == 2
    assert cache.manager.live_rows(torch.ones(64, dtype=torch.bool)) == 10


def test_too_large_a_step_is_refused_by_shape(new_cache: NewCache) -> None:
    cache = filled(new_cache)
    with pytest.raises(CapacityError, match=r"13.*12.*--device-pool-tokens"):
        cache.fetch(0, [[1] * 13])
    with pytest.raises(CapacityError, match=r"13.*12.*--device-pool-tokens"):
        cache.manager.append(0, cache.slots(list(range(13))), cache.manager.rows(0)[:0], keep=13)


def test_check_reports_a_step_that_asked_for_too_much(new_cache: NewCache) -> None:
    """Nothing is corrupted: what found no room is -1, and the next step works again."""
    cache = filled(new_cache)
    cache.manager.begin_step()
    cache.fetch(0, [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    slots = cache.slots([[20, 21, 22, 23]])
    found = cache.manager.make_resident(0, slots, torch.rand(1, 4, device=cache.device)).tolist()[0]
    assert sum(slot >= 0 for slot in found) == 2
    cache.manager.state.check()
    with pytest.raises(CacheInvariantError, match=r"layer 0: 2 rows found no device slot"):
        cache.manager.check(cache.live())
    cache.manager.begin_step()
    cache.fetch(0, [[20, 21, 22, 23]])


def test_check_sees_a_row_that_differs_from_host(new_cache: NewCache) -> None:
    cache = filled(new_cache)
    slot = cache.resident(1)[45]
    cache.device_pool.rows[1, slot, 39] ^= 1
    with pytest.raises(CacheInvariantError, match=f"layer 1.*device slot {slot}, host slot 45"):
        cache.manager.check()


def test_check_sees_rows_of_slots_that_are_not_live(new_cache: NewCache) -> None:
    cache = filled(new_cache)
    live = cache.live()
    live[45] = False
    with pytest.raises(CacheInvariantError, match=r"2 resident rows.*layer 0.*host slot 45"):
        cache.manager.check(live)


def test_layers_are_independent(new_cache: NewCache) -> None:
    cache = filled(new_cache, layers=3)
    cache.manager.begin_step()
    cache.fetch(1, [[0, 1, 2]])
    assert set(cache.resident(0)) == set(cache.resident(2)) == set(range(38, 50))
    assert {0, 1, 2} <= set(cache.resident(1))


def test_unwritten_rows_are_never_touched(new_cache: NewCache) -> None:
    """Poison in host slots that were never written is still there after heavy use."""
    cache = filled(new_cache)
    for start in range(0, 40, 6):
        cache.manager.begin_step()
        cache.fetch(0, [[start, start + 1, start + 2], [49 - start, start, -1]])
    assert bool((cache.host_pool.rows[:, 50:] == POISON).all())


def test_metadata_bytes(new_cache: NewCache) -> None:
    cache = new_cache(layers=3, device_slots=12, host_slots=64)
    assert cache.manager.metadata_bytes == 3 * (4 * 64 + 13 * 12)
