"""Every CUDA kernel compiles for Hopper, without a GPU and without spilling registers."""

from pathlib import Path
from types import ModuleType

import pytest

from echokv.errors import KernelUnavailable
from echokv.kernels.cuda import (
    append,
    build,
    fetch_listed,
    index_scores,
    prefill_prefetch,
    prefill_scores,
    recall,
    topk,
    victims,
)
from echokv.kernels.cuda.launch import BESIDE_SHARED_BYTES, CARVEOUT, MAX_SHARED_BYTES
from echokv.kernels.cuda.layer import BLOCKS_PER_SM

SOURCES = {
    "topk": topk,
    "recall": recall,
    "append": append,
    "victims": victims,
    "index_scores": index_scores,
    "prefill_scores": prefill_scores,
    "fetch_listed": fetch_listed,
}


@pytest.mark.parametrize("name", SOURCES)
def test_kernels_compile_without_spills(name: str) -> None:
    """Nor does ptxas give up on products that are to overlap."""
    cubin, usage = build.compile_cubin(name)
    assert cubin[:4] == b"\x7fELF"
    assert {kernel.name for kernel in usage} == set(SOURCES[name].KERNELS)
    assert [kernel for kernel in usage if kernel.spilled_bytes or kernel.stack_bytes] == []
    assert [kernel for kernel in usage if kernel.serialised] == []
    module = SOURCES[name].MODULE
    assert all(kernel.registers * module.threads_of(kernel.name) <= 65536 for kernel in usage)


@pytest.mark.parametrize(
    "module, name",
    [
        (recall, "make_resident"),
        (recall, "make_many_resident"),
        (append, "append_rows"),
    ],
)
def test_as_many_blocks_are_resident_as_wait_for_each_other(module: ModuleType, name: str) -> None:
    _, usage = build.compile_cubin(module.MODULE.name)
    registers = next(kernel.registers for kernel in usage if kernel.name == name)
    assert registers * module.MODULE.threads * BLOCKS_PER_SM <= 65536


def test_fetch_listed_fits_an_sm_beside_those_that_score_and_select() -> None:
    """Else what it is to run beside would wait for it, and it for the candidates.

    Registers are a quarter of an SM's each, given to whole warps in units of eight a thread, and a
    block's warps are dealt out evenly.
    """
    used = {}
    for module in (topk, fetch_listed, index_scores):
        for kernel in build.compile_cubin(module.MODULE.name)[1]:
            warps = -(-module.MODULE.threads // 32 // 4)
            used[kernel.name] = warps * 32 * (-(-kernel.registers // 8) * 8)
    for beside in ("prefetching_32", "prefetching_64", "quantise_query", "topk"):
        assert used["fetch_listed"] + used[beside] <= 65536 // 4


@pytest.mark.parametrize("rows", [1, 13, 48, 64])
@pytest.mark.parametrize("width", [4096, 32_768, 98_304, 131_072])
def test_blocks_beside_fetch_listed_fit_the_shared_memory_of_an_sm(rows: int, width: int) -> None:
    """As it is divided then, with a KiB more for each block: else the SM must be idle first."""
    cluster = topk.cluster_size(rows, width, 132, topk.PORTABLE_CLUSTER)
    chunk, cached, shared_bytes = topk.part_of_row(width, cluster, BESIDE_SHARED_BYTES)
    listed, list_bytes = topk.list_of_row(width, chunk, 2048)
    assert cached > 0 or chunk <= topk.HELD
    assert listed > 0 and max(shared_bytes, list_bytes) <= BESIDE_SHARED_BYTES
    assert index_scores.PREFETCHING_SHARED_BYTES <= BESIDE_SHARED_BYTES
    assert BESIDE_SHARED_BYTES + 2 * 1024 <= CARVEOUT * 228 * 1024 // 100


def test_index_scores_fit_the_shared_memory_of_a_block() -> None:
    """What the wrapper asks for is what the source, when it compiled, asserted."""
    source = (build.FOLDER / "index_scores.cu").read_text()
    for size in (index_scores.SHARED_BYTES, index_scores.PREFETCHING_SHARED_BYTES):
        assert f"== {size}," in source
        assert size <= MAX_SHARED_BYTES


def test_prefill_scores_fit_the_shared_memory_of_a_block() -> None:
    source = (build.FOLDER / "prefill_scores.cu").read_text()
    for size in (prefill_scores.SHARED_BYTES, prefill_prefetch.SHARED_BYTES):
        assert f"== {size}," in source
        assert size <= MAX_SHARED_BYTES


def test_every_source_is_tested() -> None:
    assert {path.stem for path in build.FOLDER.glob("*.cu")} == set(SOURCES)


def test_a_cubin_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHOKV_CACHE_DIR", str(tmp_path / "cubins"))
    first = build.load_cubin("topk")
    kept = list((tmp_path / "cubins").iterdir())
    assert [path.read_bytes() for path in kept] == [first]

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} was compiled again")

    monkeypatch.setattr(build, "compile_cubin", refuse)
    assert build.load_cubin("topk") == first


def test_another_source_is_another_cubin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when only a header changed."""
    for path in build.FOLDER.glob("*.cu*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv("ECHOKV_CACHE_DIR", str(tmp_path / "cubins"))
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    build.load_cubin("topk")
    with (tmp_path / "device.cuh").open("a") as file:
        file.write("// changed\n")
    build.load_cubin("topk")
    assert len(list((tmp_path / "cubins").iterdir())) == 2


def test_what_does_not_compile_is_an_error_with_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "device.cuh").write_text("")
    (tmp_path / "broken.cu").write_text("int f() { return nonsense; }\n")
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    with pytest.raises(KernelUnavailable, match=r"(?s)broken.cu doesn't compile .*nonsense"):
        build.compile_cubin("broken")


@pytest.mark.parametrize("width", [1, 64, 4096, 98_304, 1_000_003])
@pytest.mark.parametrize("rows", [1, 13, 64, 5000])
@pytest.mark.parametrize("most", [topk.PORTABLE_CLUSTER, topk.MAX_CLUSTER])
def test_topk_covers_every_row_within_shared_memory(rows: int, width: int, most: int) -> None:
    cluster = topk.cluster_size(rows, width, 132, most)
    chunk, cached, shared_bytes = topk.part_of_row(width, cluster)
    listed, list_bytes = topk.list_of_row(width, chunk, 2048)
    assert listed >= min(width, 2048) or chunk > 2**18  # then only the sure way is left
    assert list_bytes <= 227 * 1024
    assert cluster in (1, 2, 4, 8, 16)
    assert chunk * cluster >= width
    assert chunk % 4 == cached % 4 == 0
    assert shared_bytes <= 227 * 1024


@pytest.mark.parametrize("rows", [1, 13, 24, 64, 300])
@pytest.mark.parametrize("k", [1, 64, 2048, 2049])
@pytest.mark.parametrize("beside", [False, True])
def test_make_resident_covers_every_entry_with_blocks_that_fit(
    rows: int, k: int, beside: bool
) -> None:
    """One more block appends; beside others a block has an SM for itself: 26 of 132 SMs, and up to
    66 where blocks of 1024 threads would look at one tile after the other."""
    plan = recall.resident_plan(rows, k, 132, beside=beside)
    assert plan.tiles_per_row * plan.lanes * plan.threads // 32 >= k
    assert plan.tiles == rows * plan.tiles_per_row
    many = min(rows * -(-k // 1024), 66)
    most = max(26, many) if plan.wide else 132 * BLOCKS_PER_SM - 1
    assert plan.blocks == min(plan.tiles, most)
    assert plan.wide == (beside and rows * k > 4096)


@pytest.mark.parametrize("rows", [1, 13, 64, 65, 512, 8192, 100_000])
@pytest.mark.parametrize("row_bytes", [656, 1152, 2304, 40])
def test_append_rows_covers_every_row_with_blocks_that_fit(rows: int, row_bytes: int) -> None:
    plan = append.append_plan(rows, row_bytes, 132)
    assert 1 <= plan.each <= append.MODULE.threads
    assert plan.most // plan.each <= 132 * BLOCKS_PER_SM
    assert plan.shared_bytes <= 227 * 1024 // BLOCKS_PER_SM
    assert rows > 64 or plan.each >= min(rows, 43)
