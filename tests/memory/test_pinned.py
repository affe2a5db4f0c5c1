"""Registration in chunks, its failure, NUMA spreading and the reading of the machine's limits."""

import mmap
from pathlib import Path

import pytest
import torch

from echokv.errors import CapacityError
from echokv.memory import host_pages, pinned
from echokv.memory.host_memory import HostMemory, online_numa_nodes, require_host_bytes
from echokv.memory.host_pages import interleave_over_numa_nodes
from echokv.memory.pinned import PinnedBuffer, copy_in, within_chunks

PAGE = mmap.PAGESIZE


class FakeRegistrar:
    """Keeps books like the driver: no overlap, no range twice, unregister by its start."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.ranges: dict[int, int] = {}
        self.fail_at = fail_at

    def register(self, address: int, nbytes: int) -> None:
        if self.fail_at is not None and len(self.ranges) == self.fail_at:
            raise RuntimeError("CUDA error: out of memory")
        for start, size in self.ranges.items():
            assert address + nbytes <= start or start + size <= address
        self.ranges[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.ranges[address]


def buffer(nbytes: int, registrar: FakeRegistrar, chunk: int = 4 * PAGE) -> PinnedBuffer:
    return PinnedBuffer(
        nbytes, what="host pool", flag="--host-pool-gib", registrar=registrar,
        register_chunk_bytes=chunk,
    )  # fmt: skip


@pytest.mark.parametrize("nbytes", [1, PAGE, 4 * PAGE - 1, 4 * PAGE, 4 * PAGE + 1, 19 * PAGE + 5])
def test_chunks_cover_the_range_exactly(nbytes: int) -> None:
    registrar = FakeRegistrar()
    one = buffer(nbytes, registrar)
    base = one.tensor.data_ptr()
    assert one.tensor.numel() == nbytes
    assert base % PAGE == 0
    assert not one.tensor.any()
    ends = base
    for start, size in sorted(registrar.ranges.items()):
        assert start == ends
        assert size <= 4 * PAGE
        ends = start + size
    assert ends == base + nbytes
    one.close()
    assert registrar.ranges == {}
    one.close()


@pytest.mark.parametrize("first", [0, 5, 24, 25, 31])
def test_a_copy_never_spans_two_registrations(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    registrar = FakeRegistrar()
    one = buffer(40 * 656, registrar)
    chunks = registrar.ranges
    rows = one.tensor.view(40, 656)
    source = torch.randint(1, 256, (9, 656), dtype=torch.uint8)
    copies: list[tuple[int, int]] = []
    copy = torch.Tensor.copy_

    def watched(target: torch.Tensor, values: torch.Tensor, **how: bool) -> torch.Tensor:
        copies.append((target.data_ptr(), target.numel()))
        return copy(target, values, **how)

    monkeypatch.setattr(torch.Tensor, "copy_", watched)
    copy_in(rows[first : first + 9], source, register_chunk_bytes=4 * PAGE)
    monkeypatch.undo()
    for address, nbytes in copies:
        inside = [start <= address and address + nbytes <= start + size
                  for start, size in chunks.items()]  # fmt: skip
        assert sum(inside) == 1
    assert torch.equal(rows[first : first + 9], source)
    assert not rows[:first].any() and not rows[first + 9 :].any()
    one.close()


def test_a_range_is_cut_at_multiples_of_a_chunk() -> None:
    assert list(within_chunks(0, 0, 8)) == []
    assert list(within_chunks(3, 8, 8)) == [(3, 8)]
    assert list(within_chunks(8, 9, 8)) == [(8, 9)]
    assert list(within_chunks(5, 30, 8)) == [(5, 8), (8, 16), (16, 24), (24, 30)]


def test_the_default_chunk_is_64_gib() -> None:
    assert pinned.REGISTER_CHUNK_BYTES == 64 * 2**30
    assert list(host_pages.chunks(130 * 2**30, pinned.REGISTER_CHUNK_BYTES)) == [
        (0, 64 * 2**30),
        (64 * 2**30, 64 * 2**30),
        (128 * 2**30, 2 * 2**30),
    ]


def test_memory_is_touched_in_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "TOUCH_CHUNK_BYTES", PAGE)
    one = buffer(33 * PAGE + 3, FakeRegistrar())
    assert not one.tensor.any()
    one.tensor.fill_(9)
    one.close()


def test_views_outlive_close() -> None:
    """The device loses access at once, but a view that is still held stays readable."""
    one = buffer(3 * PAGE, FakeRegistrar())
    view = one.tensor[PAGE:]
    view.fill_(5)
    one.close()
    assert int(view.sum()) == 5 * 2 * PAGE


def test_a_refused_chunk_undoes_the_others() -> None:
    registrar = FakeRegistrar(fail_at=2)
    with pytest.raises(CapacityError, match=r"out of memory.*ulimit -l.*--host-pool-gib"):
        buffer(20 * PAGE, registrar)
    assert registrar.ranges == {}


def test_numa_spreading_only_where_there_is_something_to_spread() -> None:
    calls: list[tuple[int, int, int, list[int]]] = []
    interleave_over_numa_nodes(PAGE, 7, [0], lambda *call: calls.append(call))
    assert calls == []
    interleave_over_numa_nodes(PAGE, 7, [0, 2, 70], lambda *call: calls.append(call))
    assert calls == [(PAGE, 7, 3, [0, 2, 70])]


def test_numa_refusal_is_logged_and_harmless(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*args: object) -> None:
        raise OSError(1, "Operation not permitted")

    with caplog.at_level("WARNING", logger="echokv"):
        interleave_over_numa_nodes(PAGE, 7, [0, 1], refuse)
    assert "not spread over NUMA nodes [0, 1]" in caplog.text


def test_the_mbind_system_call_itself() -> None:
    """Interleaving over the one node there is must be accepted, a missing node refused."""
    one = buffer(8 * PAGE, FakeRegistrar())
    try:
        host_pages._mbind(one.tensor.data_ptr(), 8 * PAGE, 3, [online_numa_nodes()[0]])
    except OSError as error:
        pytest.skip(f"this kernel or container refuses mbind: {error}")
    with pytest.raises(OSError, match="nvalid"):
        host_pages._mbind(one.tensor.data_ptr(), 8 * PAGE, 3, [1000])
    one.close()


def write(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


MEMINFO = "MemTotal:       100 kB\nMemFree:        20 kB\nMemAvailable:     64 kB\n"


def test_memory_without_a_control_group(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", MEMINFO)
    assert HostMemory.read(tmp_path) == HostMemory(available=64 * 1024, cgroup=None)


def test_control_groups_v2(tmp_path: Path) -> None:
    """The tightest group above the process counts; "max" is no limit."""
    write(tmp_path, "proc/meminfo", MEMINFO)
    write(tmp_path, "proc/self/cgroup", "0::/slice/task\n")
    for group, limit, usage in (("slice", "9000", "4000"), ("slice/task", "max", "3000")):
        write(tmp_path, f"sys/fs/cgroup/{group}/memory.max", f"{limit}\n")
        write(tmp_path, f"sys/fs/cgroup/{group}/memory.current", f"{usage}\n")
    assert HostMemory.read(tmp_path).cgroup == 5000
    assert HostMemory.read(tmp_path).usable == 5000


def test_control_groups_v1(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", MEMINFO)
    write(tmp_path, "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/box\n0::/\n")
    base = "sys/fs/cgroup/memory"
    write(tmp_path, f"{base}/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path, f"{base}/memory.usage_in_bytes", "500\n")
    assert HostMemory.read(tmp_path).cgroup is None
    write(tmp_path, f"{base}/box/memory.limit_in_bytes", "100000\n")
    write(tmp_path, f"{base}/box/memory.usage_in_bytes", "120000\n")
    assert HostMemory.read(tmp_path).cgroup == 0


def test_a_group_path_that_climbs_does_not_loop(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", MEMINFO)
    write(tmp_path, "proc/self/cgroup", "0::/../../..\n")
    assert HostMemory.read(tmp_path).cgroup is None


def test_this_machine_can_be_read() -> None:
    assert HostMemory.read().available > 0
    assert online_numa_nodes()


def test_numa_nodes(tmp_path: Path) -> None:
    assert online_numa_nodes(tmp_path) == [0]
    write(tmp_path, "sys/devices/system/node/has_memory", "0-2,5\n")
    assert online_numa_nodes(tmp_path) == [0, 1, 2, 5]


def test_require_host_bytes(caplog: pytest.LogCaptureFixture) -> None:
    gib = 2**30
    require_host_bytes(5, what="pool", flag="--x", memory=HostMemory(available=5, cgroup=None))
    with pytest.raises(CapacityError, match=r"pool needs 3\.00 GiB.*2\.00 GiB.*--x"):
        require_host_bytes(
            3 * gib, what="pool", flag="--x", memory=HostMemory(available=2 * gib, cgroup=None)
        )
    with pytest.raises(CapacityError, match=r"1\.00 GiB"):
        require_host_bytes(
            3 * gib, what="pool", flag="--x", memory=HostMemory(available=2 * gib, cgroup=gib)
        )
    with caplog.at_level("WARNING", logger="echokv"):
        require_host_bytes(
            3 * gib, what="pool", flag="--x", memory=HostMemory(available=2 * gib, cgroup=4 * gib)
        )
    assert "the control group leaves 4.00 GiB" in caplog.text
