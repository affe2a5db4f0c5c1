"""Top-k on one Hopper GPU: right at real sizes first, then how long it takes.

    python benchmarks/device/cuda_cache.py --out cuda_cache.json

The CUDA C++ kernel, without and with the names of rows, beside Triton's and `torch.topk`; the
oracle is a stable sort, and for names the reference. (The cache's own kernels are measured by
cache_ops.py.) Times are medians of CUDA graph replays with the L2 cache overwritten before each, a
call's share of a graph of four, each with scores of its own.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cache as common  # benchmarks/device/cache.py
from echokv.bench.report import environment
from echokv.kernels.reference.name_rows import name_rows
from echokv.kernels.registry import load_kernels
from echokv.memory.slots import BLOCK_TOKENS
from kernels import DISTRIBUTIONS  # benchmarks/device/kernels.py

TOPK_SHAPES = (
    (13, 98_304),
    (1, 1_000_064),
    (1, 98_304),
    (13, 32_768),
    (64, 32_768),
    (64, 98_304),
    (1024, 8192),
    (1, 4096),
)
K = 2048


class CudaBench(common.Bench):
    """The kernels of both GPU backends, and flags."""

    def __init__(self, sizes: common.Sizes, device: torch.device) -> None:
        super().__init__(sizes, device)
        self.cuda = load_kernels("cuda", device)
        self.checks: list[dict[str, Any]] = []

    def check(self, name: str, ok: bool, **more: Any) -> None:
        """Note one verdict."""
        self.checks.append({"check": name, "ok": bool(ok)} | more)
        if not ok:
            print(f"WRONG: {name} {more}", flush=True)


def tables_of(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[rows] int32 rows of block tables, and tables with blocks in random order."""
    blocks = -(-width // BLOCK_TOKENS)
    tables = torch.randperm(rows * blocks, device=device).to(torch.int32).view(rows, blocks)
    return torch.randperm(rows, device=device).to(torch.int32), tables


def check_topk(bench: CudaBench) -> None:
    """Positions and k-th scores against a stable sort."""
    for name, make in DISTRIBUTIONS.items():
        for width in (64, 8192, 98_304, 1_000_064):
            lens = sorted({n for n in (0, 1, K - 1, K, K + 1, width - 1, width) if n <= width})
            with bench.device:
                scores = torch.stack([make(width) for _ in lens])
            for row, length in enumerate(lens):
                scores[row, length:] = torch.nan
            context = torch.tensor(lens, dtype=torch.int32, device=bench.device)
            positions, kth = bench.cuda.topk(scores, context, K)
            owners, tables = tables_of(len(lens), width, bench.device)
            named = bench.cuda.topk_rows(scores, context, K, owners, tables)
            want_names = name_rows(positions, scores, owners, tables)
            ok = torch.equal(named[0], positions) and torch.equal(named[1], kth)
            for got, names in zip(named[2:], want_names, strict=True):
                ok &= torch.equal(got.view(torch.int32), names.view(torch.int32))
            for row, length in enumerate(lens):
                order = torch.sort(scores[row, :length] + 0.0, descending=True, stable=True)
                want = order.indices[:K].sort().values.to(torch.int32)
                ok &= torch.equal(positions[row, : len(want)], want)
                ok &= bool((positions[row, len(want) :] == -1).all())
                last = float(order.values[K - 1]) if length >= K else -torch.inf
                ok &= float(kth[row]) == last
            bench.check(f"topk {name} width {width}", ok)


def time_interleaved(
    bench: CudaBench, runs: dict[str, Callable[[], object]], prepare: Callable[[], object]
) -> dict[str, dict[str, float]]:
    """Spread of each run's graph, taking turns; microseconds."""
    graphs, samples = {}, {name: [] for name in runs}
    for name, run in runs.items():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                prepare()
                run()
        torch.cuda.current_stream().wait_stream(stream)
        prepare()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            run()
    for _ in range(bench.sizes.repeats):
        for name, graph in graphs.items():
            prepare()
            bench._flush.zero_()
            samples[name].append(common.clock(graph.replay, bench._flush.device))
    return {name: common.spread(taken) for name, taken in samples.items()}


def topk_times(bench: CudaBench) -> list[dict[str, Any]]:
    """Each implementation, cold (one of four score tensors a call, none in L2) and warm."""
    results = []
    for rows, width in TOPK_SHAPES:
        scores = [torch.randn(rows, width, device=bench.device) for _ in range(4)]
        lens = torch.full((rows,), width, dtype=torch.int32, device=bench.device)
        named = tables_of(rows, width, bench.device)
        ops: dict[str, Callable[[Tensor], object]] = {
            "cuda": lambda s, n=lens: bench.cuda.topk(s, n, K),
            "cuda, named": lambda s, n=lens, named=named: bench.cuda.topk_rows(s, n, K, *named),
            "triton": lambda s, n=lens: bench.kernels.topk(s, n, K),
            "torch": lambda s: torch.topk(s, K, dim=1),
        }
        cold = {
            name: (lambda op=op, many=scores: [op(s) for s in many]) for name, op in ops.items()
        }
        warm = {
            f"{name} warm": lambda op=ops[name], one=scores[0]: [op(one) for _ in range(4)]
            for name in ("cuda", "cuda, named")
        }
        times = time_interleaved(bench, cold | warm, lambda: None)
        for name, taken in times.items():
            each = {key: value / 4 for key, value in taken.items()}
            results.append({"rows": rows, "width": width, "variant": name} | each)
        line = ", ".join(f"{name} {taken['median'] / 4:.1f}" for name, taken in times.items())
        print(f"topk {rows} x {width}: {line} us", flush=True)
    return results


def main() -> int:
    """Run, write JSON, say where; 1 when something was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", default="", help="commit of the code that runs")
    parser.add_argument("--repeats", type=int, default=30, help="replays of each graph")
    options = parser.parse_args()
    device = torch.device("cuda")
    torch.manual_seed(7)
    bench = CudaBench(replace(common.REAL, repeats=options.repeats), device)
    report: dict[str, Any] = {
        "environment": environment() | {"commit": options.commit},
        "sizes": asdict(bench.sizes),
    }
    stages: dict[str, Callable[[], Any]] = {
        "check topk": lambda: check_topk(bench),
        "topk_us": lambda: topk_times(bench),
    }
    common.run_stages(stages, report, bench.checks, options.out)
    return common.verdict(bench.checks, options.out)


if __name__ == "__main__":
    sys.exit(main())
