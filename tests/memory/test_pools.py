"""Pools have the shapes and sizes they promise, and say so when memory does not suffice."""

import pytest
import torch
from tests.memory.test_managed import FakeDriver

from echokv.errors import CapacityError
from echokv.memory import pinned, pools
from echokv.memory.host_memory import HostMemory
from echokv.memory.pools import DevicePool, HostPool, IndexKeyPool

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("row_bytes", [656, 1152])
def test_shapes_and_zeroes(row_bytes: int) -> None:
    host = HostPool(3, 128, row_bytes, CPU)
    device = DevicePool(3, 37, row_bytes, CPU)
    keys = IndexKeyPool(2, 2, 132 * 64, CPU)
    assert host.rows.shape == (3, 128, row_bytes)
    assert device.rows.shape == (3, 37, row_bytes)
    assert keys.pages.shape == (2, 2, 132 * 64)
    for tensor in (host.rows, device.rows, keys.pages):
        assert tensor.dtype == torch.uint8
        assert tensor.is_contiguous()
        assert not tensor.any()
    host.close()
    assert host.rows.numel() == 0
    host.close()


def test_host_pool_is_whole_blocks() -> None:
    with pytest.raises(AssertionError, match="100 host slots"):
        HostPool(1, 100, 656, CPU)


def test_a_pinned_host_pool_registers_exactly_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[int] = []

    class Registrar:
        def register(self, address: int, nbytes: int) -> None:
            registered.append(nbytes)

        def unregister(self, address: int) -> None:
            registered.pop()

    monkeypatch.setattr(pinned, "CudaRegistrar", Registrar)
    host = HostPool(2, 192, 656, CUDA, "pinned")
    assert registered == [2 * 192 * 656]
    assert host.rows.shape == (2, 192, 656)
    host.rows.fill_(7)
    host.close()
    assert registered == []


def test_a_managed_host_pool_allocates_exactly_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(pools, "managed_refusal", lambda device: None)
    monkeypatch.setattr(pools, "CudaManagedDriver", lambda device: driver)
    host = HostPool(2, 192, 656, CUDA)
    assert [memory.numel() for memory in driver.memory.values()] == [2 * 192 * 656]
    assert host.rows.shape == (2, 192, 656)
    host.rows.fill_(9)
    host.close()
    assert driver.memory == {}


def test_a_host_pool_may_lie_in_memory_that_outlives_it() -> None:
    memory = torch.full((2 * 128 * 656 + 5,), 7, dtype=torch.uint8)
    host = HostPool(2, 128, 656, CPU, memory=memory)
    assert host.rows.shape == (2, 128, 656)
    host.rows[1, 3] = 9
    host.close()
    assert host.rows.numel() == 0
    assert int((memory == 9).sum()) == 656 and int(memory[-1]) == 7
    with pytest.raises(AssertionError, match="don't hold"):
        HostPool(2, 192, 656, CPU, memory=memory)


def test_a_host_pool_that_cannot_be_is_refused_before_it_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        HostMemory, "read", classmethod(lambda cls: cls(available=2**20, cgroup=None))
    )
    with pytest.raises(CapacityError, match=r"host pool needs 0\.09 GiB.*--host-pool-gib"):
        HostPool(1, 64 * 1024, 1536, CPU)


def test_device_memory_errors_carry_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(pools.torch, "zeros", out_of_memory)
    monkeypatch.setattr(pools.torch.cuda, "mem_get_info", lambda device: (2**30, 2**32))
    with pytest.raises(CapacityError, match=r"10\.00 GiB.*1\.00 GiB.*--device-pool-tokens"):
        DevicePool(10, 2**20, 1024, CPU)
    with pytest.raises(CapacityError, match=r"index keys.*2\.00 GiB.*--host-pool-gib"):
        IndexKeyPool(2, 2**20, 1024, CPU)
