"""How fast one GPU reads random rows from host memory, and what that depends on.

    python benchmarks/device/host_reads.py --out host_reads.json

A bare gather, one warp a row, in graphs of eight launches, after the L2 cache was overwritten.
Every launch of every replay has rows of its own: what was read a moment ago comes faster.

    kinds    what `HostPool` takes (managed) and took before (pinned); the latter in pages of 4 KiB;
             cudaHostAlloc; the driver's own memory on the host; and HBM, for the kernel itself
    spans    how much memory the rows come from
    launches blocks, and rows of 1152 B, within 1 GiB
    windows  rows of 512 B, eight from one aligned stretch of so many bytes: as long as that is one
             page to the GPU, seven of the eight share the first one's translation
    beside   a gather and a read of HBM, one after the other and together
"""

import argparse
import ctypes
import json
import mmap
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from echokv.bench.report import environment
from echokv.memory.managed import CudaManagedDriver, ManagedBuffer
from echokv.memory.pinned import PinnedBuffer

MIB, GIB = 2**20, 2**30
LAUNCHES = 8
REPLAYS = 7
COUNTS = (512, 2665, 16_384)
WINDOWS = (4096, 2**16, 2**17, 2**18, 2**19, 2**20, 2**21, 2**22, 2**23)
TOGETHER = 8  # rows of a window
SOURCE = r"""
struct Words { unsigned x, y, z, w; };
extern "C" __global__ __launch_bounds__(1024) void gather(
    const char* host, char* pool, const int* from, const int* to, int count, int row_bytes) {
  const unsigned lane = threadIdx.x % 32, warps = gridDim.x * (blockDim.x / 32);
  for (unsigned at = threadIdx.x / 32 * gridDim.x + blockIdx.x; at < count; at += warps) {
    const char* source = host + (long long)from[at] * row_bytes;
    char* target = pool + (long long)to[at] * row_bytes;
    Words row[3];
#pragma unroll
    for (int i = 0; i < 3; i++)
      if (lane * 16 + i * 512 < row_bytes)
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(row[i].x), "=r"(row[i].y), "=r"(row[i].z), "=r"(row[i].w)
                     : "l"(source + lane * 16 + i * 512));
#pragma unroll
    for (int i = 0; i < 3; i++)
      if (lane * 16 + i * 512 < row_bytes)
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target + lane * 16 + i * 512),
                     "r"(row[i].x), "r"(row[i].y), "r"(row[i].z), "r"(row[i].w) : "memory");
  }
}

extern "C" __global__ void read_hbm(const int4* data, long long count, int* out) {
  int sum = 0;
  for (long long at = blockIdx.x * blockDim.x + threadIdx.x; at < count;
       at += (long long)gridDim.x * blockDim.x)
    sum += data[at].x ^ data[at].w;
  if (sum == 0x7fffffff) *out = 1;
}
"""


def ok(result: Any) -> Any:
    """What a call of cuda-bindings returns, or an error with its name."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(str(error))
    return values[0] if values else None


def load_kernels(*names: str, source: str = SOURCE) -> list[Any]:
    """The kernels, compiled."""
    from cuda.bindings import driver, nvrtc

    program = ok(nvrtc.nvrtcCreateProgram(source.encode(), b"gather.cu", 0, [], []))
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    ok(nvrtc.nvrtcCompileProgram(program, len(options), options))
    cubin = b" " * ok(nvrtc.nvrtcGetCUBINSize(program))
    ok(nvrtc.nvrtcGetCUBIN(program, cubin))
    module = ok(driver.cuModuleLoadData(cubin))
    return [ok(driver.cuModuleGetFunction(module, name.encode())) for name in names]


class Bench:
    """The kernel, a device pool, and the clock."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")
        self.gather, self.read_hbm = load_kernels("gather", "read_hbm")
        self.slots = 200_000
        self.pool = torch.empty(self.slots * 1152, dtype=torch.uint8, device="cuda")
        self.flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
        self.work = torch.randint(0, 255, (160 * MIB,), dtype=torch.uint8, device="cuda")
        self.unused = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.results: list[dict[str, Any]] = []
        self.beside: list[dict[str, Any]] = []

    def note(
        self, kind: str, base: int, span: int, rows: int, *, row_bytes: int = 656,
        blocks: int = 132, threads: int = 512, window: int | None = None,
    ) -> float:  # fmt: skip
        """Microseconds of one gather of so many rows; kept with its case.

        Args:
            kind: name of the memory.
            base: its address.
            span: bytes that rows come from.
            rows: rows a launch, a multiple of TOGETHER with a window.
            row_bytes: bytes a row; divides the window.
            blocks: of a launch.
            threads: of a block.
            window: bytes of a stretch that TOGETHER rows come from; None: each on its own.
        """
        rows_of = Rows(self, span, rows, row_bytes, window)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for sources, targets in rows_of.each():
                self._launch(base, sources, targets, row_bytes, blocks, threads)
        taken = self._time(graph, rows_of.draw)
        self.results.append({
            "kind": kind, "span": span, "rows": rows, "row_bytes": row_bytes, "blocks": blocks,
            "threads": threads, "window": window, "us": taken,
            "GB_per_s": rows * row_bytes / taken / 1e3,
        })  # fmt: skip
        return taken

    def note_beside(self, kind: str, base: int, span: int, rows: int) -> dict[str, float]:
        """Microseconds of a gather, of a read of HBM, and of both at once; kept."""
        rows_of, side = Rows(self, span, rows, 656, None), torch.cuda.Stream()
        count = ctypes.c_longlong(self.work.numel() // 16)

        def replay(gather: bool, read: bool) -> float:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for sources, targets in rows_of.each():
                    main = torch.cuda.current_stream()
                    side.wait_stream(main)
                    if gather:
                        self._launch(base, sources, targets, 656, 33, 512)
                    with torch.cuda.stream(side):
                        if read:
                            self._call(self.read_hbm, 264, 512, self.work, count, self.unused)
                    main.wait_stream(side)
            return self._time(graph, rows_of.draw)

        taken = {
            "gather": replay(True, False), "read": replay(False, True), "both": replay(True, True),
        }  # fmt: skip
        self.beside.append({"kind": kind, "span": span, "rows": rows, "us": taken})
        return taken

    def _launch(
        self, base: int, sources: torch.Tensor, targets: torch.Tensor, row_bytes: int, blocks: int,
        threads: int,
    ) -> None:  # fmt: skip
        numbers = [ctypes.c_int(number) for number in (sources.shape[0], row_bytes)]
        self._call(self.gather, blocks, threads, base, self.pool, sources, targets, *numbers)

    def _call(
        self, kernel: Any, blocks: int, threads: int, *arguments: Any, shared: int = 0
    ) -> None:
        """Launch, with bytes of shared memory.

        Tensors and addresses are pointers, other arguments are ctypes' already.
        """
        from cuda.bindings import driver

        values = [
            ctypes.c_void_p(one.data_ptr() if isinstance(one, torch.Tensor) else one)
            if isinstance(one, torch.Tensor | int)
            else one
            for one in arguments
        ]
        packed = (ctypes.c_void_p * len(values))(*(ctypes.addressof(one) for one in values))
        stream = torch.cuda.current_stream().cuda_stream
        ok(driver.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, shared, stream,
                                 ctypes.addressof(packed), 0))  # fmt: skip

    def _time(self, graph: torch.cuda.CUDAGraph, draw: Callable[[], None]) -> float:
        times = []
        for _ in range(REPLAYS):
            draw()
            self.flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / LAUNCHES)
        return statistics.median(times)


class Rows:
    """Which rows each launch of a graph reads and where they go, in tensors that stay."""

    def __init__(
        self, bench: Bench, span: int, rows: int, row_bytes: int, window: int | None
    ) -> None:
        self._slots, self._span, self._row_bytes = bench.slots, span, row_bytes
        self._window = window
        self._sources = torch.zeros((LAUNCHES, rows), dtype=torch.int32, device="cuda")
        self._targets = torch.zeros_like(self._sources)
        self.draw()

    def each(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Sources and targets of every launch, [rows] int32 each."""
        return zip(self._sources, self._targets, strict=True)

    def draw(self) -> None:
        """Others."""
        rows = self._sources.shape[1]
        if self._window is None:
            self._sources.random_(0, self._span // self._row_bytes)
        else:
            shape, inside = (LAUNCHES, rows // TOGETHER, 1), self._window // self._row_bytes
            starts = torch.randint(0, self._span // self._window, shape, device="cuda") * inside
            first = torch.randint(0, inside, shape, device="cuda")
            step = inside // TOGETHER  # apart, as far as can be
            offsets = torch.arange(TOGETHER, device="cuda") * step
            self._sources.copy_((starts + (first + offsets) % inside).flatten(1))
        order = torch.rand(LAUNCHES, self._slots, device="cuda").argsort(dim=1)
        self._targets.copy_(order[:, :rows])


# Kinds of memory: an address, and what keeps it alive.


def managed(nbytes: int) -> tuple[int, Any]:
    """What a host pool takes."""
    driver = CudaManagedDriver(torch.device("cuda"))
    buffer = ManagedBuffer(nbytes, what="host memory", flag="--gib", driver=driver)
    return buffer.tensor.data_ptr(), buffer


def pinned(nbytes: int) -> tuple[int, Any]:
    """What it takes where memory can't be managed."""
    buffer = PinnedBuffer(nbytes, what="host memory", flag="--gib")
    return buffer.tensor.data_ptr(), buffer


def small_pages(nbytes: int) -> tuple[int, Any]:
    """Pages of 4 KiB, touched and registered."""
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    base, step = tensor.data_ptr(), 256 * MIB
    with ThreadPoolExecutor(8) as pool:
        starts = range(0, nbytes, step)
        list(pool.map(lambda at: ctypes.memset(base + at, 0, min(step, nbytes - at)), starts))
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(base, nbytes, 3))
    return base, tensor


def host_alloc(nbytes: int) -> tuple[int, Any]:
    """cudaHostAlloc."""
    from cuda.bindings import driver

    return int(ok(driver.cuMemHostAlloc(nbytes, 3))), None


def driver_memory(nbytes: int) -> tuple[int, Any]:
    """cuMemCreate on the host's first NUMA node, mapped by 2 MiB."""
    from cuda.bindings import driver

    places, prop = driver.CUmemLocationType, driver.CUmemAllocationProp()
    prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type, prop.location.id = places.CU_MEM_LOCATION_TYPE_HOST_NUMA, 0
    nbytes = -(-nbytes // (2 * MIB)) * 2 * MIB
    handle = ok(driver.cuMemCreate(nbytes, prop, 0))
    address = ok(driver.cuMemAddressReserve(nbytes, 2 * MIB, driver.CUdeviceptr(0), 0))
    ok(driver.cuMemMap(address, nbytes, 0, handle, 0))
    access = driver.CUmemAccessDesc()
    access.location.type, access.location.id = places.CU_MEM_LOCATION_TYPE_DEVICE, 0
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(driver.cuMemSetAccess(address, nbytes, [access], 1))
    return int(address), handle


def hbm(nbytes: int) -> tuple[int, Any]:
    """Device memory."""
    tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    return tensor.data_ptr(), tensor


KINDS: tuple[Callable[[int], tuple[int, Any]], ...] = (
    managed,
    pinned,
    small_pages,
    host_alloc,
    driver_memory,
    hbm,
)


def by_span(bench: Bench, kind: str, base: int, span: int) -> None:
    """Rows from more and more memory."""
    for mib in (64, 1024, 2048, 4096, 12_288):
        if mib * MIB <= span:
            taken = [bench.note(kind, base, mib * MIB, rows) for rows in COUNTS]
            print(f"{kind} within {mib} MiB, {COUNTS} rows:",
                  *(f"{one:.1f}" for one in taken), "us", flush=True)  # fmt: skip


def by_window(bench: Bench, kind: str, base: int, span: int) -> None:
    """Rows that come together from a window."""
    for window in (*WINDOWS, None):
        taken = bench.note(kind, base, span, 2664, row_bytes=512, window=window)
        print(f"{kind}, windows of {window} B, 2664 rows of 512 B: {taken:.1f} us", flush=True)


def by_launch(bench: Bench, kind: str, base: int) -> None:
    """Blocks and rows, within 1 GiB."""
    for row_bytes in (656, 1152):
        for blocks in (16, 66, 264):
            taken = [bench.note(kind, base, GIB, rows, row_bytes=row_bytes, blocks=blocks)
                     for rows in COUNTS]  # fmt: skip
            print(f"{kind}, {row_bytes} B, {blocks} blocks, {COUNTS} rows:",
                  *(f"{one:.1f}" for one in taken), "us", flush=True)  # fmt: skip


def main() -> int:
    """Run, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", default="", help="commit of the code that runs")
    parser.add_argument("--gib", type=float, default=12, help="GiB of memory of each kind")
    options = parser.parse_args()
    bench, span, kept = Bench(), int(options.gib * GIB) // (8 * MIB) * 8 * MIB, []
    report = {
        "environment": environment() | {"commit": options.commit},
        "gathers": bench.results,
        "beside": bench.beside,
    }
    for make in KINDS:
        start, kind = time.perf_counter(), make.__name__
        base, memory = make(span)
        kept.append(memory)
        print(f"-- {kind}: {options.gib} GiB in {time.perf_counter() - start:.2f} s")
        by_span(bench, kind, base, span)
        if make in (managed, pinned):
            by_window(bench, kind, base, span)
            by_launch(bench, kind, base)
            taken = bench.note_beside(kind, base, span, 2665)
            print(f"{kind}, beside:", {what: round(us, 1) for what, us in taken.items()})
        options.out.write_text(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
