"""How fast one GPU reads random rows from host memory, and what that depends on.

    python benchmarks/device/host_reads.py --out host_reads.json

A bare gather, one warp a row, in graphs of eight launches of other random rows each, after the L2
cache was overwritten: by kind of memory (what `HostPool` does; the same in pages of 4 KiB;
cudaHostAlloc; the driver's own memory on the host), by launch, by the stretch of memory that rows
come from, and over several layers' stretches in turn, in random or ascending order; and after one
word of each 2 MiB was read, hidden behind other work. HBM stands beside them for what the kernel
itself costs.
"""

import argparse
import ctypes
import json
import mmap
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from echokv.bench.report import environment
from echokv.memory.pinned import PinnedBuffer

MIB, GIB = 2**20, 2**30
LAUNCHES = 8
REPLAYS = 7
LAYER_BYTES = 1_800_000 * 656
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

extern "C" __global__ void touch(const char* host, long long span, long long step, int* out) {
  int sum = 0;
  for (long long at = (blockIdx.x * blockDim.x + threadIdx.x) * step; at < span;
       at += (long long)gridDim.x * blockDim.x * step) {
    int word;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(host + at));
    sum += word;
  }
  if (sum == 0x7fffffff) *out = 1;
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
        self.gather, self.touch, self.read_hbm = load_kernels("gather", "touch", "read_hbm")
        self.slots = 200_000
        self.pool = torch.empty(self.slots * 1152, dtype=torch.uint8, device="cuda")
        self.flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
        self.work = torch.randint(0, 255, (160 * MIB,), dtype=torch.uint8, device="cuda")
        self.unused = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.results: list[dict[str, Any]] = []
        self.touched: list[dict[str, Any]] = []

    def note(
        self,
        kind: str,
        base: int,
        span: int,
        rows: int,
        *,
        row_bytes: int = 656,
        blocks: int = 132,
        threads: int = 512,
        run: int = 1,
        layers: int = 1,
        ascending: bool = False,
    ) -> float:
        """Microseconds of one gather of so many rows; kept with its case.

        Args:
            kind: name of the memory.
            base: its address.
            span: bytes that rows come from; with layers, of each in turn, one after the other.
            rows: rows a launch.
            row_bytes: bytes a row.
            blocks: of a launch.
            threads: of a block.
            run: neighbouring rows that come together.
            layers: stretches that launches take turns in.
            ascending: in the order of addresses, not at random.
        """
        sources, targets = self._draw(span, rows, row_bytes, run, ascending)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(LAUNCHES):
                here = base + index % layers * span
                self._launch(here, sources[index], targets[index], row_bytes, blocks, threads)
        taken = self._time(graph)
        self.results.append({
            "kind": kind, "span": span, "rows": rows, "row_bytes": row_bytes, "blocks": blocks,
            "threads": threads, "run": run, "layers": layers, "ascending": ascending, "us": taken,
            "GB_per_s": rows * row_bytes / taken / 1e3,
        })  # fmt: skip
        return taken

    def note_touched(self, base: int, span: int, rows: int, layers: int) -> tuple[float, ...]:
        """Microseconds a gather takes behind a read of HBM: as it is, and with pages touched.

        One word of each 2 MiB that rows may come from is read beside the read of HBM, on another
        stream. Layers lie LAYER_BYTES apart, and rows come from the first `span` bytes of each:
        others in every replay, as those of a decode step are.
        """
        drawn = [self._draw(span, rows, 656, 1, False) for _ in range(REPLAYS)]
        sources, targets = (one.clone() for one in drawn[0])

        def draw(number: int) -> None:
            for tensor, new in zip((sources, targets), drawn[number], strict=True):
                tensor.copy_(new)

        side, main = torch.cuda.Stream(), torch.cuda.current_stream

        def replay(touch: bool, gather: bool) -> float:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for index in range(LAUNCHES):
                    here = base + index % layers * LAYER_BYTES
                    if touch:
                        side.wait_stream(main())
                        with torch.cuda.stream(side):
                            values = (ctypes.c_longlong(span), ctypes.c_longlong(2 * MIB))
                            self._call(self.touch, 18, 32, here, *values, self.unused)
                    count = ctypes.c_longlong(self.work.numel() // 16)
                    self._call(self.read_hbm, 128, 512, self.work, count, self.unused)
                    if touch:
                        main().wait_stream(side)
                    if gather:
                        self._launch(here, sources[index], targets[index], 656, 132, 512)
            return self._time(graph, draw)

        alone = replay(False, False)
        taken = (replay(False, True) - alone, replay(True, True) - alone)
        self.touched.append({
            "span": span, "rows": rows, "layers": layers, "us": taken[0], "touched_us": taken[1],
        })  # fmt: skip
        return taken

    def _draw(
        self, span: int, rows: int, row_bytes: int, run: int, ascending: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows to read and where to put them, [LAUNCHES, rows] int32 each."""
        starts = torch.randint(
            0, span // row_bytes - run, (LAUNCHES, -(-rows // run)), device="cuda"
        )
        sources = (starts[:, :, None] + torch.arange(run, device="cuda")).flatten(1)[:, :rows]
        if ascending:
            sources = sources.sort(dim=1).values
        order = torch.rand(LAUNCHES, self.slots, device="cuda").argsort(dim=1)
        targets = order[:, :rows].to(torch.int32).contiguous()
        return sources.to(torch.int32).contiguous(), targets

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

    def _time(
        self, graph: torch.cuda.CUDAGraph, prepare: Callable[[int], None] = lambda _: None
    ) -> float:
        times = []
        for number in range(REPLAYS):
            prepare(number)
            self.flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / LAUNCHES)
        return statistics.median(times)


# Kinds of memory: an address, and what keeps it alive.


def host_pool(nbytes: int) -> tuple[int, Any]:
    """What echokv does."""
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
    host_pool,
    small_pages,
    host_alloc,
    driver_memory,
    hbm,
)


def by_layers(bench: Bench, kind: str, base: int, span: int) -> None:
    """Layers of 1.8M rows, one in turn or several, as a decode step visits them."""
    for layers in (1, span // LAYER_BYTES):
        for ascending in (False, True):
            for blocks in (16, 132):
                counts = (64, 512, 2665, 16_384)
                taken = [bench.note(kind, base, LAYER_BYTES, rows, blocks=blocks, layers=layers,
                                    ascending=ascending) for rows in counts]  # fmt: skip
                order = "ascending" if ascending else "random"
                print(f"{kind}, {layers} layers in turn, {order}, {blocks} blocks, {counts} rows:",
                      *(f"{one:.1f}" for one in taken), "us", flush=True)  # fmt: skip


def by_touch(bench: Bench, kind: str, base: int, span: int) -> None:
    """Layers in turn, all of their rows or those of 426K tokens, with pages touched ahead."""
    layers = span // LAYER_BYTES
    for stretch in (LAYER_BYTES, 426_000 * 656):
        for rows in (533, 2665, 16_384):
            cold, touched = bench.note_touched(base, stretch, rows, layers)
            print(f"{kind}, {layers} layers in turn, {rows} rows of {stretch / 1e9:.2f} GB each:",
                  f"{cold:.1f} us, pages touched {touched:.1f}", flush=True)  # fmt: skip


def by_span(bench: Bench, kind: str, base: int, span: int) -> None:
    """Rows from more and more memory, and in runs."""
    for mib in (64, 1024, 1536, 2048, 4096):
        if mib * MIB <= span:
            taken = [bench.note(kind, base, mib * MIB, rows) for rows in (512, 2665, 16_384)]
            print(f"{kind} within {mib} MiB, 512/2665/16384 rows:",
                  *(f"{one:.1f}" for one in taken), "us", flush=True)  # fmt: skip
    for run in (2, 4):
        taken = [bench.note(kind, base, span, 2665, run=run)]
        print(f"{kind}, runs of {run} rows, 2665: {taken[0]:.1f} us", flush=True)


def by_launch(bench: Bench, kind: str, base: int) -> None:
    """Blocks and rows, within 1 GiB."""
    for row_bytes in (656, 1152):
        for blocks in (8, 16, 66, 132, 264):
            taken = [bench.note(kind, base, GIB, rows, row_bytes=row_bytes, blocks=blocks)
                     for rows in (64, 512, 2665, 16_384)]  # fmt: skip
            print(f"{kind}, {row_bytes} B, {blocks} blocks, 64/512/2665/16384 rows:",
                  *(f"{one:.1f}" for one in taken), "us", flush=True)  # fmt: skip


def main() -> int:
    """Run, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", default="", help="commit of the code that runs")
    parser.add_argument("--gib", type=float, default=4.5, help="GiB of memory of each kind")
    parser.add_argument("--only-layers", action="store_true", help="layers of a host pool alone")
    options = parser.parse_args()
    bench, span, kept = Bench(), int(options.gib * GIB) // (2 * MIB) * 2 * MIB, []
    report = {
        "environment": environment() | {"commit": options.commit},
        "gathers": bench.results,
        "touched": bench.touched,
    }
    for make in KINDS[: 1 if options.only_layers else None]:
        start = time.perf_counter()
        base, memory = make(span)
        kept.append(memory)
        print(f"-- {make.__name__}: {options.gib} GiB in {time.perf_counter() - start:.2f} s")
        if make is host_pool:
            by_layers(bench, make.__name__, base, span)
            by_touch(bench, make.__name__, base, span)
        if not options.only_layers:
            by_span(bench, make.__name__, base, span)
            by_launch(bench, make.__name__, base)
        options.out.write_text(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
