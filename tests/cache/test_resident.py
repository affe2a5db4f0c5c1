"""The cache without offloading: addresses are places, nothing moves."""

import pytest
import torch

from echokv.cache.resident import ResidentCache
from echokv.cache.state import CacheInvariantError
from echokv.kernels.registry import load_kernels
from echokv.memory.pools import DevicePool
from echokv.memory.slots import HostSlots

CPU = torch.device("cpu")


def make(backend: str = "reference") -> tuple[ResidentCache, torch.Tensor]:
    pool = DevicePool(2, 64, 40, CPU)
    pool.rows.fill_(0xFF)
    return ResidentCache(load_kernels(backend, CPU), pool), pool.rows


def slots(*values: int) -> HostSlots:
    return HostSlots(torch.tensor(values, dtype=torch.int32))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_rows_stay_where_they_were_written(backend: str) -> None:
    cache, pool = make(backend)
    want = pool.clone()
    rows = torch.randint(0, 255, (4, 40), dtype=torch.uint8)
    for layer in range(2):
        cache.begin_step()
        cache.append(layer, slots(63, -1, 5, 0), rows, keep=1)
        want[layer, [63, 5, 0]] = rows[[0, 2, 3]]
    assert torch.equal(cache.rows(0), want[0])
    assert torch.equal(cache.rows(1), want[1])
    wanted = HostSlots(torch.tensor([[0, 5, 63], [5, -1, -1]], dtype=torch.int32))
    assert torch.equal(cache.make_resident(1, wanted, torch.rand(2, 3)), wanted)


def test_figures() -> None:
    cache, _ = make()
    cache.append(0, slots(1, 2, -1, 3), torch.zeros(4, 40, dtype=torch.uint8), keep=4)
    cache.append(1, slots(1, 2, -1, 3), torch.zeros(4, 40, dtype=torch.uint8), keep=4)
    assert cache.capacity == 64
    assert cache.metadata_bytes == 5 * 64
    assert [counts.resident for counts in cache.counters()] == [3, 3]
    cache.release(torch.tensor([2, -1, 40], dtype=torch.int32))
    assert [counts.resident for counts in cache.counters()] == [2, 2]
    live = torch.zeros(64, dtype=torch.bool)
    live[[1, 7]] = True
    assert cache.live_rows(live) == 1


def test_check_sees_rows_of_slots_that_are_not_live() -> None:
    cache, _ = make()
    cache.append(0, slots(1, 2), torch.zeros(2, 40, dtype=torch.uint8), keep=2)
    cache.check()
    live = torch.zeros(64, dtype=torch.bool)
    live[1] = True
    with pytest.raises(CacheInvariantError, match=r"1 written rows.*\[2\]"):
        cache.check(live)
    cache.release(torch.tensor([2], dtype=torch.int32))
    cache.check(live)
