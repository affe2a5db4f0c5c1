"""How fast one GPU reads random rows from host memory, by how that memory was made and by launch.

    python benchmarks/device/host_reads.py --out host_reads.json

A bare gather, one warp a row, in graphs of eight launches of other random rows each, after the L2
cache was overwritten. Kinds of memory: what `HostPool` does (mapped, huge pages, registered), the
same without huge pages, pages of hugetlbfs, cudaHostAlloc, and the driver's own physical memory on
the host (cuMemCreate), which it maps by 2 MiB. Footprints say what address translation costs.
"""

import argparse
import ctypes
import json
import mmap
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from echokv.bench.report import environment

GIB = 2**30
LAUNCHES = 8
SOURCE = r"""
struct Words { unsigned x, y, z, w; };
template <int ROWS>
__device__ void gather(const char* host, char* pool, const int* from, const int* to, int count,
                       int row_bytes) {
  const unsigned lane = threadIdx.x % 32, warps = gridDim.x * (blockDim.x / 32);
  const unsigned words = row_bytes / 16;
  for (unsigned at = (threadIdx.x / 32 * gridDim.x + blockIdx.x) * ROWS; at < count;
       at += warps * ROWS) {
    Words row[ROWS][3];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (at + r >= count) continue;
      const char* source = host + (long long)from[at + r] * row_bytes;
#pragma unroll
      for (int i = 0; i < 3; i++)
        if (lane + i * 32 < words)
          asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(row[r][i].x), "=r"(row[r][i].y), "=r"(row[r][i].z),
                         "=r"(row[r][i].w) : "l"(source + (lane + i * 32) * 16));
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (at + r >= count) continue;
      char* target = pool + (long long)to[at + r] * row_bytes;
#pragma unroll
      for (int i = 0; i < 3; i++)
        if (lane + i * 32 < words)
          asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target + (lane + i * 32) * 16),
                       "r"(row[r][i].x), "r"(row[r][i].y), "r"(row[r][i].z), "r"(row[r][i].w)
                       : "memory");
    }
  }
}
extern "C" __global__ __launch_bounds__(1024) void gather1(const char* h, char* p, const int* f, const int* t, int n, int b) {
  gather<1>(h, p, f, t, n, b);
}
extern "C" __global__ __launch_bounds__(1024) void gather2(const char* h, char* p, const int* f, const int* t, int n, int b) {
  gather<2>(h, p, f, t, n, b);
}
extern "C" __global__ __launch_bounds__(1024) void gather4(const char* h, char* p, const int* f, const int* t, int n, int b) {
  gather<4>(h, p, f, t, n, b);
}
"""


def ok(result: Any) -> Any:
    """What a call of cuda-bindings returns, or an error with its name."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(str(error))
    return values[0] if values else None


def load_kernels() -> dict[int, Any]:
    """Rows in flight of a warp -> kernel."""
    from cuda.bindings import driver, nvrtc

    program = ok(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"gather.cu", 0, [], []))
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    ok(nvrtc.nvrtcCompileProgram(program, len(options), options))
    cubin = b" " * ok(nvrtc.nvrtcGetCUBINSize(program))
    ok(nvrtc.nvrtcGetCUBIN(program, cubin))
    module = ok(driver.cuModuleLoadData(cubin))
    return {n: ok(driver.cuModuleGetFunction(module, f"gather{n}".encode())) for n in (1, 2, 4)}


class Bench:
    """Kernels, the device pool, and the clock."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")
        self.kernels = load_kernels()
        self.pool = torch.empty(200_000 * 1152, dtype=torch.uint8, device="cuda")
        self.flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
        self.results: list[dict[str, Any]] = []

    def time(
        self, base: int, span: int, rows: int, row_bytes: int, blocks: int, threads: int,
        in_flight: int = 1, repeats: int = 7, group: int = 1, flush: bool = True,
    ) -> float:  # fmt: skip
        """Microseconds of one gather of random rows of the first `span` bytes at base."""
        from cuda.bindings import driver

        limit = span // row_bytes
        starts = torch.randint(0, limit - group, (LAUNCHES, -(-rows // group)), device="cuda")
        sources = (starts[:, :, None] + torch.arange(group, device="cuda")).flatten(1)
        sources = sources[:, :rows].to(torch.int32).contiguous()
        targets = torch.stack([torch.randperm(200_000, device="cuda")[:rows]
                               for _ in range(LAUNCHES)]).to(torch.int32)  # fmt: skip

        def run() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for one in range(LAUNCHES):
                values = (
                    ctypes.c_void_p(base), ctypes.c_void_p(self.pool.data_ptr()),
                    ctypes.c_void_p(sources[one].data_ptr()),
                    ctypes.c_void_p(targets[one].data_ptr()),
                    ctypes.c_int(rows), ctypes.c_int(row_bytes),
                )  # fmt: skip
                arguments = (ctypes.c_void_p * 6)(*(ctypes.addressof(value) for value in values))
                ok(driver.cuLaunchKernel(self.kernels[in_flight], blocks, 1, 1, threads, 1, 1, 0,
                                         stream, ctypes.addressof(arguments), 0))  # fmt: skip

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times = []
        for _ in range(repeats):
            if flush:
                self.flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / LAUNCHES)
        return statistics.median(times)

    def note(self, kind: str, base: int, span: int, rows: int, row_bytes: int, **launch: Any) -> float:
        """Time and keep one case."""
        taken = self.time(base, span, rows, row_bytes, **launch)
        self.results.append({"kind": kind, "span": span, "rows": rows, "row_bytes": row_bytes,
                             "us": taken, "GB_per_s": rows * row_bytes / taken / 1e3} | launch)  # fmt: skip
        return taken


# Kinds of memory: each returns an address and what keeps it alive.


def mapped(nbytes: int, flags: int, advice: int | None) -> tuple[int, Any]:
    """Anonymous memory, touched and registered."""
    from concurrent.futures import ThreadPoolExecutor

    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    if advice is not None:
        mapping.madvise(advice)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    base, step = tensor.data_ptr(), 256 * 2**20
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: ctypes.memset(base + at, 0, min(step, nbytes - at)),
                      range(0, nbytes, step)))  # fmt: skip
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(base, nbytes, 3))
    return base, tensor


def host_pool(nbytes: int) -> tuple[int, Any]:
    """What echokv does."""
    from echokv.memory.pinned import PinnedBuffer

    buffer = PinnedBuffer(nbytes, what="pool", flag="-")
    return buffer.tensor.data_ptr(), buffer


def no_huge_pages(nbytes: int) -> tuple[int, Any]:
    """Pages of 4 KiB."""
    return mapped(nbytes, 0, mmap.MADV_NOHUGEPAGE)


def hugetlb(nbytes: int) -> tuple[int, Any]:
    """Pages of hugetlbfs, 2 MiB."""
    Path("/proc/sys/vm/nr_hugepages").write_text(str(nbytes // 2**21 + 8))
    return mapped(nbytes, 0x40000, None)


def host_alloc(nbytes: int) -> tuple[int, Any]:
    """cudaHostAlloc."""
    from cuda.bindings import driver

    return int(ok(driver.cuMemHostAlloc(nbytes, 3))), None


def write_combined(nbytes: int) -> tuple[int, Any]:
    """cudaHostAlloc, write-combined."""
    from cuda.bindings import driver

    return int(ok(driver.cuMemHostAlloc(nbytes, 7))), None


def driver_physical(nbytes: int) -> tuple[int, Any]:
    """cuMemCreate on the host's NUMA node 0."""
    from cuda.bindings import driver

    kinds = driver.CUmemLocationType
    prop = driver.CUmemAllocationProp()
    prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = kinds.CU_MEM_LOCATION_TYPE_HOST_NUMA
    prop.location.id = 0
    grain = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    step = int(ok(driver.cuMemGetAllocationGranularity(prop, grain)))
    print("cuMemCreate's granularity on the host:", step)
    nbytes = -(-nbytes // step) * step
    handle = ok(driver.cuMemCreate(nbytes, prop, 0))
    address = ok(driver.cuMemAddressReserve(nbytes, 2**21, driver.CUdeviceptr(0), 0))
    ok(driver.cuMemMap(address, nbytes, 0, handle, 0))
    access = []
    for kind in (kinds.CU_MEM_LOCATION_TYPE_DEVICE, kinds.CU_MEM_LOCATION_TYPE_HOST_NUMA):
        one = driver.CUmemAccessDesc()
        one.location.type, one.location.id = kind, 0
        one.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        access.append(one)
    ok(driver.cuMemSetAccess(address, nbytes, access, len(access)))
    ctypes.memset(int(address), 1, 2**21)
    return int(address), handle


def on_device(nbytes: int) -> tuple[int, Any]:
    """HBM: what the kernel itself costs."""
    tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    return tensor.data_ptr(), tensor


KINDS = (host_pool, host_alloc, driver_physical, no_huge_pages, hugetlb, on_device)


def kind_times(bench: Bench, name: str, base: int, span: int) -> None:
    """Rows by number and size; then footprints."""
    for row_bytes in (656, 1152):
        for blocks, threads in ((16, 512), (132, 512), (264, 512), (264, 512), (132, 512)):
            taken = [bench.note(name, base, span, rows, row_bytes, blocks=blocks, threads=threads)
                     for rows in (64, 512, 2665, 16384)]  # fmt: skip
            print(f"{name} {row_bytes} B, {blocks} x {threads}, rows 64/512/2665/16384:",
                  *(f"{one:.1f}" for one in taken), "us", flush=True)  # fmt: skip
    for mib in (4, 64, 512, 1024, 1536, 2048, 2560, 3072, 4096):
        if mib * 2**20 <= span:
            taken = [bench.note(name, base, mib * 2**20, rows, 656, blocks=132, threads=512)
                     for rows in (512, 2665, 16384)]  # fmt: skip
            print(f"{name} within {mib} MiB, rows 512/2665/16384:", *(f"{t:.1f}" for t in taken),
                  flush=True)  # fmt: skip
    for group in (2, 4, 16):
        taken = bench.note(name, base, span, 2665, 656, blocks=132, threads=512, group=group)
        print(f"{name} in runs of {group} rows, 2665: {taken:.1f} us", flush=True)
    taken = bench.note(name, base, span, 2665, 656, blocks=132, threads=512, flush=False)
    print(f"{name} without flushing L2, 2665: {taken:.1f} us", flush=True)


def launch_times(bench: Bench, name: str, base: int, span: int) -> None:
    """Every launch of one kind."""
    for rows in (64, 512, 2665, 16384):
        for threads in (256, 512, 1024):
            line = []
            for blocks in (8, 16, 33, 66, 132, 264):
                for in_flight in (1, 2, 4):
                    taken = bench.note(name, base, span, rows, 656, blocks=blocks,
                                       threads=threads, in_flight=in_flight)  # fmt: skip
                    line.append(f"{taken:.1f}")
            print(f"{name} {rows} rows, {threads} threads, 8..264 blocks x 1,2,4 in flight:", *line,
                  flush=True)  # fmt: skip


def machine() -> None:
    """What may explain the rest."""
    for command in ("cat /sys/kernel/mm/transparent_hugepage/enabled", "lscpu | grep -i -E 'numa|model'",
                    "nvidia-smi --query-gpu=driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv",
                    "nvidia-smi topo -m | head -5", "ls /sys/class/iommu; cat /proc/cmdline",
                    "cat /proc/driver/nvidia/params | grep -i -E 'sysmem|page|ats|iommu'"):  # fmt: skip
        print("$", command)
        print(subprocess.run(command, shell=True, capture_output=True, text=True).stdout.strip(), flush=True)


def main() -> int:
    """Run, write JSON, say where."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", default="", help="commit of the code that runs")
    parser.add_argument("--gib", type=float, default=4.4, help="GiB of host memory of each kind")
    options = parser.parse_args()
    machine()
    bench, span = Bench(), int(options.gib * GIB) // 2**21 * 2**21
    kept = []
    for kind in KINDS:
        start = time.perf_counter()
        try:
            base, keep = kind(span)
        except (RuntimeError, OSError, ValueError) as error:
            print(f"{kind.__name__}: {type(error).__name__}: {error}", flush=True)
            continue
        torch.cuda.synchronize()
        kept.append(keep)
        seconds = time.perf_counter() - start
        print(f"-- {kind.__name__}: {options.gib} GiB in {seconds:.2f} s", flush=True)
        if kind is host_pool:
            print(subprocess.run("grep -i -E 'huge' /proc/meminfo", shell=True, capture_output=True,
                                 text=True).stdout)  # fmt: skip
        kind_times(bench, kind.__name__, base, span)
        if kind is host_pool:
            launch_times(bench, kind.__name__, base, 2**30)
        options.out.write_text(json.dumps(
            {"environment": environment() | {"commit": options.commit}, "gathers": bench.results},
            indent=1) + "\n")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
