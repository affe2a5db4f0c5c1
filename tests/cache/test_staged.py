"""Copies of rows that the device pool has no room for: every row once, wherever it was."""

from collections.abc import Callable

import torch
from tests.cache.harness import Cache

NewCache = Callable[..., Cache]


def written(new_cache: NewCache, tokens: int = 50) -> Cache:
    """Both layers' first rows are written, the last twelve of them resident."""
    cache = new_cache()
    cache.manager.begin_step()
    for layer in range(2):
        cache.append(layer, list(range(tokens)))
    cache.manager.begin_step()
    return cache


def staged(cache: Cache, layer: int, wanted: list[list[int]], most: int) -> None:
    """Stage, and compare with the truth and with what is to stay as it is."""
    state = cache.manager.state
    before = [tensor.clone() for tensor in (state.device_to_host, state.priority)]
    pool = cache.device_pool.rows.clone()
    rows, places = cache.manager.stage(layer, cache.slots(wanted), most_rows=most)
    assert rows.shape == (most, cache.row_bytes) and places.dtype == torch.int32
    distinct = sorted({slot for row in wanted for slot in row} - {-1})
    for asked, given in zip(
        cache.slots(wanted).flatten().tolist(), places.flatten().tolist(), strict=True
    ):
        assert given == (distinct.index(asked) if asked >= 0 else -1)
        if asked >= 0:
            assert bytes(rows[given].tolist()) == cache.truth[layer, asked]
    assert torch.equal(before[0], state.device_to_host)
    assert torch.equal(before[1], state.priority)
    assert torch.equal(pool, cache.device_pool.rows)
    cache.manager.check(cache.live())


def test_more_rows_than_the_pool_has(new_cache: NewCache) -> None:
    cache = written(new_cache)
    everything = [list(range(0, 50, 2)), list(range(25, 50))]
    for layer, most in ((0, 38), (1, 64)):
        staged(cache, layer, everything, most)


def test_nothing_all_resident_and_all_absent(new_cache: NewCache) -> None:
    cache = written(new_cache)
    for wanted in (
        [[-1, -1]],
        [[49, 38, -1], [40, 49, 49]],
        [[0, 37, 0], [-1, 5, 37]],
        [[63 - 14]],
    ):
        staged(cache, 1, wanted, 6)


def test_each_row_counts_once_in_a_step(new_cache: NewCache) -> None:
    cache = written(new_cache)
    cache.fetch(0, [[0, 1, 49]])  # two are recalled, for one of the twelve that were resident each
    resident = set(cache.resident(0))
    before = cache.manager.counters()[0]
    assert (before.selected, before.recalled) == (3, 2)
    wanted = [[0, 1, 2, 3], [49, *sorted(resident - {0, 1, 49})[:3]]]
    staged(cache, 0, wanted, 12)
    after = cache.manager.counters()[0]
    assert after.selected - before.selected == 5  # 0, 1 and 49 have been
    assert after.recalled - before.recalled == 2  # 2 and 3
    cache.manager.begin_step()
    staged(cache, 0, [[0, 2]], 2)
    last = cache.manager.counters()[0]
    assert (last.selected - after.selected, last.recalled - after.recalled) == (2, 1)
