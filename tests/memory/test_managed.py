"""Managed memory: what the driver is asked for and when, what is given back, who takes it.

On a GPU: kernels read what the CPU wrote and the other way round, in graphs too.
"""

import mmap

import pytest
import torch

from echokv.errors import CapacityError, ConfigError
from echokv.memory import managed, pools
from echokv.memory.host_memory import HostMemory
from echokv.memory.managed import CudaManagedDriver, ManagedBuffer, managed_refusal
from echokv.memory.pinned import PinnedBuffer
from echokv.memory.pools import HostPool, host_memory_kind

PAGE = mmap.PAGESIZE
CUDA = torch.device("cuda")


class FakeDriver:
    """Keeps books like the driver, over plain memory that is dirty at first."""

    def __init__(self, fail_at: str | None = None, *, nodes: bool = True) -> None:
        self.memory: dict[int, torch.Tensor] = {}
        self.kept: list[tuple[int, int, int | None]] = []
        self.mapped: list[tuple[int, int]] = []
        self.fail_at = fail_at
        self.nodes = nodes  # whether it knows them

    def allocate(self, nbytes: int) -> int:
        self._may_fail("allocate")
        memory = torch.full((nbytes,), 7, dtype=torch.uint8)
        self.memory[memory.data_ptr()] = memory
        return memory.data_ptr()

    def keep_on_host(self, address: int, nbytes: int, node: int | None) -> None:
        self._may_fail("keep_on_host")
        if node is not None and not self.nodes:
            raise RuntimeError("invalid device ordinal")
        [base] = self.memory
        assert not self.mapped, "preferred first, mapped when the pages are there"
        assert int(self.memory[base].min()) == 7, "preferred before pages are touched"
        self.kept.append((address - base, nbytes, node))

    def map(self, address: int, nbytes: int) -> None:
        self._may_fail("map")
        [base] = self.memory
        assert not self.memory[base].any(), "mapped after all pages are touched"
        self.mapped.append((address - base, nbytes))

    def free(self, address: int) -> None:
        del self.memory[address]

    def _may_fail(self, what: str) -> None:
        if what == self.fail_at:
            raise RuntimeError("out of memory")


def buffer(nbytes: int, driver: FakeDriver) -> ManagedBuffer:
    return ManagedBuffer(nbytes, what="host pool", flag="--host-pool-gib", driver=driver)


@pytest.mark.parametrize("nbytes", [1, 4 * PAGE - 1, 4 * PAGE, 4 * PAGE + 1, 19 * PAGE + 5])
@pytest.mark.parametrize("nodes", [[0], [0, 1], [0, 2, 5]])
def test_the_whole_range_is_kept_on_the_host_zeroed_and_mapped(
    nbytes: int, nodes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managed, "TOUCH_CHUNK_BYTES", 4 * PAGE)
    monkeypatch.setattr(managed, "online_numa_nodes", lambda: nodes)
    driver = FakeDriver()
    one = buffer(nbytes, driver)
    assert one.tensor.numel() == nbytes and not one.tensor.any()
    assert driver.kept[0] == (0, nbytes, None)
    spread = driver.kept[1:]
    pieces = [(at, min(4 * PAGE, nbytes - at)) for at in range(0, nbytes, 4 * PAGE)]
    assert driver.mapped == pieces
    assert [(at, size) for at, size, _ in spread] == (pieces if len(nodes) > 1 else [])
    assert [node for _, _, node in spread] == [nodes[i % len(nodes)] for i in range(len(spread))]


def test_numa_nodes_that_the_driver_does_not_know_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(managed, "online_numa_nodes", lambda: [0, 1])
    driver = FakeDriver(nodes=False)
    with caplog.at_level("WARNING", logger="echokv"):
        one = buffer(3 * PAGE, driver)
    assert "not spread over NUMA nodes [0, 1]: invalid device ordinal" in caplog.text
    assert driver.kept == [(0, 3 * PAGE, None)] and driver.mapped == [(0, 3 * PAGE)]
    one.close()


def test_bytes_go_back_with_the_last_view() -> None:
    driver = FakeDriver()
    one = buffer(3 * PAGE, driver)
    view = one.tensor[PAGE:]
    view.fill_(5)
    one.close()
    one.close()
    assert len(driver.memory) == 1
    assert int(view.sum()) == 5 * 2 * PAGE
    del view
    assert driver.memory == {}


@pytest.mark.parametrize("fail_at", ["allocate", "keep_on_host", "map"])
def test_what_the_driver_refuses_is_given_back(fail_at: str) -> None:
    driver = FakeDriver(fail_at)
    with pytest.raises(
        CapacityError, match=r"out of memory.*--host-pool-gib.*--host-memory pinned"
    ) as caught:
        buffer(20 * PAGE, driver)
    caught.value.__cause__ = None  # its traceback holds the frame that holds the tensor
    del caught
    assert driver.memory == {}


def test_auto_is_managed_where_that_can_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pools, "managed_refusal", lambda device: None)
    assert [host_memory_kind(kind, CUDA) for kind in ("auto", "managed", "pinned")] == [
        "managed", "managed", "pinned",
    ]  # fmt: skip
    monkeypatch.setattr(pools, "managed_refusal", lambda device: "no such thing here")
    with caplog.at_level("WARNING", logger="echokv"):
        assert host_memory_kind("auto", CUDA) == "pinned"
    assert "half as fast: no such thing here" in caplog.text
    assert host_memory_kind("pinned", CUDA) == "pinned"
    with pytest.raises(ConfigError, match="--host-memory managed: no such thing here"):
        host_memory_kind("managed", CUDA)


def test_why_there_is_none_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert managed_refusal(CUDA) in ("torch sees no CUDA device", "cuda-bindings isn't installed")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["managed", "pinned"])
def test_both_sides_see_what_the_other_wrote(kind: str) -> None:
    from echokv.kernels.triton.recall import recall

    slots, count = 64 * 4000, 3000
    pool = HostPool(2, slots, 656, CUDA, kind)
    assert isinstance(pool._buffer, ManagedBuffer if kind == "managed" else PinnedBuffer)
    assert not pool.rows[:, ::999].any()
    rows = torch.randint(0, 256, (slots, 656), dtype=torch.uint8)
    pool.rows[1].copy_(rows)
    sources, targets = (torch.randperm(n, device=CUDA)[:count].int() for n in (slots, count))
    number = torch.tensor([count], dtype=torch.int32, device=CUDA)
    landed = torch.zeros((count, 656), dtype=torch.uint8, device=CUDA)

    def read() -> None:
        recall(sources, number, targets, pool.rows[1], landed)

    read()
    assert torch.equal(landed[targets.long()].cpu(), rows[sources.long().cpu()])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read()
    pool.rows[1].add_(1)  # by the CPU, while the pages are mapped into the GPU
    graph.replay()
    assert torch.equal(landed[targets.long()].cpu(), (rows + 1)[sources.long().cpu()])
    pool.rows[0].copy_(rows.to(CUDA))
    assert torch.equal(pool.rows[0], rows)
    pool.close()


@pytest.mark.gpu
def test_closing_gives_host_memory_back() -> None:
    before, nbytes = HostMemory.read().available, 4 * 2**30
    one = ManagedBuffer(nbytes, what="memory", flag="--x", driver=CudaManagedDriver(CUDA))
    assert HostMemory.read().available < before - nbytes / 2
    one.close()
    assert HostMemory.read().available > before - nbytes / 2
