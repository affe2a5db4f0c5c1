"""By which instruction random rows come from host memory: plain loads, or cp.async.

    python benchmarks/device/host_copies.py --out host_copies.json

The gather of host_reads.py, which loads a row into registers and stores it, beside one that has it
copied to shared memory (cp.async.cg, sixteen bytes a lane) and stores it from there; 132 blocks of
512 threads, a warp a row, rows within 1 GiB, both over the same rows, taking turns.
"""

import argparse
import ctypes
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import host_reads  # benchmarks/device/host_reads.py
import torch

from echokv.bench.report import environment

ROWS = (64, 512, 2665, 16_384)
REPLAYS = 31
SOURCE = r"""
extern "C" __global__ __launch_bounds__(512) void gather_async(
    const char* host, char* pool, const int* from, const int* to, int count, int row_bytes) {
  extern __shared__ __align__(16) char shared[];
  const int lane = threadIdx.x % 32, warps = gridDim.x * (blockDim.x / 32);
  char* landing = shared + threadIdx.x / 32 * row_bytes;
  for (int at = threadIdx.x / 32 * gridDim.x + blockIdx.x; at < count; at += warps) {
    const char* source = host + (long long)from[at] * row_bytes;
    char* target = pool + (long long)to[at] * row_bytes;
    for (int byte = lane * 16; byte < row_bytes; byte += 512)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                       (unsigned)__cvta_generic_to_shared(landing + byte)), "l"(source + byte)
                   : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    for (int byte = lane * 16; byte < row_bytes; byte += 512)
      *(int4*)(target + byte) = *(const int4*)(landing + byte);
  }
}
"""


class Bench(host_reads.Bench):
    """Both kernels."""

    def __init__(self) -> None:
        super().__init__()
        (self.gather_async,) = host_reads.load_kernels("gather_async", source=SOURCE)

    def compare(self, base: int, rows: int, row_bytes: int) -> dict[str, Any]:
        """Microseconds of a gather of so many rows by each instruction."""
        sources, targets = self._draw(host_reads.GIB, rows, row_bytes, 1, False)
        graphs = {}
        for name, kernel, shared in (
            ("plain loads", self.gather, 0), ("cp.async", self.gather_async, 16 * row_bytes),
        ):  # fmt: skip
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                for index in range(host_reads.LAUNCHES):
                    numbers = [ctypes.c_int(number) for number in (rows, row_bytes)]
                    self._call(kernel, 132, 512, base, self.pool, sources[index], targets[index],
                               *numbers, shared=shared)  # fmt: skip
        taken: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(REPLAYS):
            for name, graph in graphs.items():
                taken[name].append(self._once(graph))
        us = {name: statistics.median(times) for name, times in taken.items()}
        line = ", ".join(f"{name} {one:.1f}" for name, one in us.items())
        print(f"{rows} rows of {row_bytes} B: {line} us", flush=True)
        return {"rows": rows, "row_bytes": row_bytes, "us": us}

    def _once(self, graph: torch.cuda.CUDAGraph) -> float:
        self.flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / host_reads.LAUNCHES


def main() -> int:
    """Run, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", default="", help="commit of the code that runs")
    options = parser.parse_args()
    bench = Bench()
    base, memory = host_reads.host_pool(host_reads.GIB)
    copies = [bench.compare(base, rows, size) for size in (656, 1152) for rows in ROWS]
    del memory
    report = {"environment": environment() | {"commit": options.commit}, "copies": copies}
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
