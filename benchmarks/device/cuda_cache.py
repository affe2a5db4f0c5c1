"""The CUDA C++ kernels on one Hopper GPU: right at real sizes first, then how long they take.

    python benchmarks/device/cuda_cache.py --out cuda_cache.json

- `topk` beside Triton's and `torch.topk`; the oracle is a stable sort.
- `make_resident` (CUDA C++, one launch) beside the Triton ops that it stands for and beside a bare
  gather of as many rows, by batch, share of missing rows and row size. The oracle is the reference
  manager, given the same state before each step.
- `choose_victims`, which runs once a step for all layers, off the path that is timed above.

Times are medians of CUDA graph replays with the L2 cache overwritten before each, a layer's share
of a graph of several layers, each with tables and rows of its own.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import cache as common  # benchmarks/device/cache.py
from echokv.bench.report import environment
from echokv.cache.manager import CacheManager
from echokv.kernels.cuda import recall as fused
from echokv.kernels.registry import load_kernels
from echokv.memory.pools import DevicePool, HostPool
from echokv.memory.slots import HostSlots
from kernels import DISTRIBUTIONS  # benchmarks/device/kernels.py

MISSING = (0.0, 0.01, 0.03, 0.10, 0.50)
RECALLS = (0, 64, 512, 2665, 16384)
TOPK_SHAPES = (
    (1, 98_304),
    (13, 32_768),
    (13, 98_304),
    (64, 32_768),
    (64, 98_304),
    (1, 1_000_064),
    (1024, 8192),
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


def check_topk(bench: CudaBench) -> None:
    """Positions and k-th scores against a stable sort."""
    for name, make in DISTRIBUTIONS.items():
        for width in (64, 4096, 98_304, 1_000_064):
            lens = sorted({n for n in (0, 1, K - 1, K, K + 1, width - 1, width) if n <= width})
            scores = torch.stack([make(width) for _ in lens]).to(bench.device)
            for row, length in enumerate(lens):
                scores[row, length:] = torch.nan
            context = torch.tensor(lens, dtype=torch.int32, device=bench.device)
            positions, kth = bench.cuda.topk(scores, context, K)
            ok = True
            for row, length in enumerate(lens):
                order = torch.sort(scores[row, :length] + 0.0, descending=True, stable=True)
                want = order.indices[:K].sort().values.to(torch.int32)
                ok &= torch.equal(positions[row, : len(want)], want)
                ok &= bool((positions[row, len(want) :] == -1).all())
                last = float(order.values[K - 1]) if length >= K else -torch.inf
                ok &= float(kth[row]) == last
            bench.check(f"topk {name} width {width}", ok)


def check_resident(bench: CudaBench, row_bytes: int, host: HostPool) -> None:
    """The fused op against the reference manager, given the same state before each step."""
    sizes, device = bench.sizes, bench.device
    generator = torch.Generator(device=device).manual_seed(1)
    managers = []
    for kernels in (bench.cuda, bench.reference):
        pool = DevicePool(1, sizes.device_slots, row_bytes, device)
        managers.append(CacheManager(kernels, host, pool))
    ours, theirs = managers
    for step in range(sizes.check_steps):
        batch = sizes.batches[step % len(sizes.batches)]
        for name, value in vars(theirs.state).items():
            if name not in ("workspace", "slot_buffer"):
                value.copy_(getattr(ours.state, name))
        share = (0.5, 0.03, 0.0)[step % 3]
        wanted = common.next_selection(ours, batch, sizes.topk, share, generator)
        if step % 2:  # rows that requests share, and short ones
            wanted[1::2, : sizes.topk // 2] = wanted[:-1:2, : sizes.topk // 2][: len(wanted[1::2])]
            wanted[-1, sizes.topk // 3 :] = -1
        scores = torch.randn(wanted.shape, device=device, generator=generator)
        before = [manager.counters()[0] for manager in managers]
        found = []
        for manager in managers:
            manager.begin_step()
            found.append(manager.make_resident(0, wanted, scores))
        label = f"make_resident {row_bytes} B rows step {step} batch {batch} missing {share}"
        after = [manager.counters()[0] for manager in managers]
        counted = [
            {name: value - getattr(old, name) for name, value in vars(new).items()}
            for old, new in zip(before, after, strict=True)
        ]
        bench.check(f"{label}: counters", counted[0] == counted[1], ours=counted[0])
        mine = ours.state.device_to_host[0]
        held = torch.where(found[0] >= 0, mine[found[0].clamp(min=0).long()], -1)
        bench.check(f"{label}: device slots", torch.equal(held, wanted))
        levels = [manager.state.priority[0].sort().values for manager in managers]
        bench.check(f"{label}: priorities", torch.equal(*levels))
        ours.state.check()
    ours.check()
    bench.check(f"make_resident {row_bytes} B rows: bytes", True)


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
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) * 1e3)
    return {name: common.spread(taken) for name, taken in samples.items()}


def topk_times(bench: CudaBench) -> list[dict[str, Any]]:
    """Each implementation, cold (one of four score tensors a call, none in L2) and warm."""
    results = []
    for rows, width in TOPK_SHAPES:
        scores = [torch.randn(rows, width, device=bench.device) for _ in range(4)]
        lens = torch.full((rows,), width, dtype=torch.int32, device=bench.device)
        ops: dict[str, Callable[[Tensor], object]] = {
            "cuda": lambda s, n=lens: bench.cuda.topk(s, n, K),
            "triton": lambda s, n=lens: bench.kernels.topk(s, n, K),
            "torch": lambda s: torch.topk(s, K, dim=1),
        }
        cold = {
            name: (lambda op=op, many=scores: [op(s) for s in many]) for name, op in ops.items()
        }
        warm = {
            f"{name} warm": (lambda op=op, one=scores[0]: [op(one) for _ in range(4)])
            for name, op in ops.items()
        }
        times = time_interleaved(bench, cold | warm, lambda: None)
        for name, taken in times.items():
            each = {key: value / 4 for key, value in taken.items()}
            results.append({"rows": rows, "width": width, "variant": name} | each)
        line = ", ".join(f"{name} {taken['median'] / 4:.1f}" for name, taken in times.items())
        print(f"topk {rows} x {width}: {line} us", flush=True)
    return results


def gather_times(bench: CudaBench, row_bytes: int, host: HostPool, counts: list[int]) -> dict:
    """The yardstick: rows copied by CUDA C++, nothing else; by number of rows."""
    sizes, device = bench.sizes, bench.device
    pool = DevicePool(sizes.layers, sizes.device_slots, row_bytes, device)
    generator = torch.Generator(device=device).manual_seed(4)
    results = {}
    for rows in counts:
        entries = max(rows, 64)
        sources = [common.random_slots(host.num_slots, entries, generator) for _ in host.rows]
        buffers = [torch.full((pool.num_slots,), -1, dtype=torch.int32, device=device)
                   for _ in host.rows]  # fmt: skip
        count = torch.tensor([rows], dtype=torch.int32, device=device)

        def prepare(sources=sources, buffers=buffers, rows=rows) -> None:
            for source, buffer in zip(sources, buffers, strict=True):
                source.copy_(common.random_slots(host.num_slots, source.shape[0], generator))
                buffer[:rows] = common.random_slots(pool.num_slots, rows, generator)

        def run(sources=sources, buffers=buffers, count=count) -> None:
            for layer, (source, buffer) in enumerate(zip(sources, buffers, strict=True)):
                bench.cuda.recall(source, count, buffer, host.rows[layer], pool.rows[layer])

        taken = bench.time(run, prepare)
        results[rows] = {name: value / sizes.layers for name, value in taken.items()}
    return results


def with_lanes(bench: CudaBench, lanes: int) -> Any:
    """The CUDA kernels with another number of entries a warp."""
    tuned = SimpleNamespace(**{name: getattr(fused, name) for name in
                               ("victim_workspace", "choose_victims", "append_rows")})  # fmt: skip
    tuned.make_resident = partial(fused.make_resident, lanes=lanes)
    return SimpleNamespace(**(vars(bench.cuda) | {"fused": tuned}))


def resident_times(
    bench: CudaBench,
    kernels: Any,
    host: HostPool,
    row_bytes: int,
    cases: list[tuple[int, float]],
) -> list[dict[str, Any]]:
    """A layer's make_resident with begin_step outside, by batch and share of missing rows."""
    sizes, device = bench.sizes, bench.device
    manager = CacheManager(kernels, host, DevicePool(sizes.layers, sizes.device_slots, row_bytes,
                                                     device))  # fmt: skip
    results = []
    for batch, missing in cases:
        generator = torch.Generator(device=device).manual_seed(2)
        scores = torch.randn((batch, sizes.topk), device=device, generator=generator)
        wanted = [HostSlots(torch.empty((batch, sizes.topk), dtype=torch.int32, device=device))
                  for _ in range(sizes.layers)]  # fmt: skip
        for layer, slots in enumerate(wanted):
            slots.copy_(common.next_selection(manager, batch, sizes.topk, 1.0, generator,
                                              layer=layer))  # fmt: skip

        def prepare(wanted=wanted, batch=batch, missing=missing, generator=generator) -> None:
            for layer, slots in enumerate(wanted):
                slots.copy_(common.next_selection(manager, batch, sizes.topk, missing, generator,
                                                  layer=layer, previous=slots))  # fmt: skip
            manager.begin_step()

        def run(wanted=wanted, scores=scores) -> None:
            for layer, slots in enumerate(wanted):
                manager.make_resident(layer, slots, scores)

        manager.begin_step()
        run()
        taken = bench.time(run, prepare)
        before = manager.counters()[0].recalled
        prepare()
        run()
        recalled = manager.counters()[0].recalled - before
        each = {name: value / sizes.layers for name, value in taken.items()}
        results.append({"batch": batch, "missing": missing, "recalled_rows": recalled} | each)
    manager.check()
    return results


def all_resident_times(bench: CudaBench, row_bytes: int, host: HostPool) -> list[dict[str, Any]]:
    """Fused, Triton and bare gather, in one table."""
    sizes = bench.sizes
    cases = [(batch, share) for batch in sizes.batches for share in MISSING]
    ours = resident_times(bench, bench.cuda, host, row_bytes, cases)
    theirs = resident_times(bench, bench.kernels, host, row_bytes, cases)
    counts = sorted({row["recalled_rows"] for row in ours} | set(RECALLS))
    bare = gather_times(bench, row_bytes, host, counts)
    print(f"gather of {row_bytes} B rows:", {n: round(t["median"], 1) for n, t in bare.items()})
    results = []
    for mine, other in zip(ours, theirs, strict=True):
        gather = bare[mine["recalled_rows"]]
        rows = [("cuda", mine), ("triton", other), ("gather", gather)]
        what = f"batch {mine['batch']}, {mine['missing']:.0%} missing, {mine['recalled_rows']} rows"
        line = ", ".join(f"{name} {row['median']:.1f}" for name, row in rows)
        print(f"make_resident {row_bytes} B, {what}: {line} us", flush=True)
        for name, row in rows:
            results.append(mine | {"row_bytes": row_bytes, "variant": name} | row)
    for rows, taken in bare.items():
        speed = {"GB_per_s": rows * row_bytes / taken["median"] / 1e3}
        results.append({"row_bytes": row_bytes, "variant": "gather", "recalled_rows": rows}
                       | speed | taken)  # fmt: skip
    # As many rows missing as the bare gather's table has, of 13 selections.
    entries = 13 * sizes.topk
    exact = [(13, rows / entries) for rows in RECALLS[1:]]
    for row in resident_times(bench, bench.cuda, host, row_bytes, exact):
        print(f"make_resident {row_bytes} B, {row['recalled_rows']} rows: {row['median']:.1f} us")
        results.append({"row_bytes": row_bytes, "variant": "cuda"} | row)
    return results


def append_times(bench: CudaBench, host: HostPool) -> list[dict[str, Any]]:
    """A layer's append of one new row a request, by batch; begin_step outside."""
    sizes, results = bench.sizes, []
    for name, kernels in (("cuda", bench.cuda), ("triton", bench.kernels)):
        pool = DevicePool(sizes.layers, sizes.device_slots, 656, bench.device)
        manager = CacheManager(kernels, host, pool)
        generator = torch.Generator(device=bench.device).manual_seed(3)
        for batch in sizes.batches:
            rows = torch.zeros((batch, 656), dtype=torch.uint8, device=bench.device)
            new = common.random_slots(host.num_slots, batch, generator)

            def prepare(new=new, manager=manager, generator=generator) -> None:
                new.copy_(common.random_slots(host.num_slots, new.shape[0], generator))
                manager.begin_step()

            def run(new=new, rows=rows, manager=manager) -> None:
                for layer in range(sizes.layers):
                    manager.append(layer, new, rows, keep=new.shape[0])

            taken = bench.time(run, prepare)
            each = {key: value / sizes.layers for key, value in taken.items()}
            results.append({"variant": name, "batch": batch} | each)
            print(f"append {name}, batch {batch}: {each['median']:.1f} us", flush=True)
        manager.state.check()
    return results


def lanes_times(bench: CudaBench, host: HostPool) -> list[dict[str, Any]]:
    """How many entries a warp should have."""
    results = []
    for lanes in (4, 8, 16, 32):
        cases = [(1, 0.0), (1, 0.03), (13, 0.0), (13, 0.03), (64, 0.03)]
        rows = resident_times(bench, with_lanes(bench, lanes), host, 656, cases)
        results += [{"lanes": lanes} | row for row in rows]
        print(f"{lanes} lanes:", [round(row["median"], 1) for row in rows], flush=True)
    return results


def victim_times(bench: CudaBench) -> list[dict[str, Any]]:
    """choose_victims over 61 layers, once a step."""
    device, layers, slots = bench.device, 61, bench.sizes.device_slots
    counters = fused.victim_workspace(layers, device)
    clock = 2000
    steps = torch.empty((layers, slots), device=device).exponential_(1 / 250).clamp(max=1900)
    priority = ((clock - 1 - steps.to(torch.int32)) << 3) + torch.randint(
        0, 8, (layers, slots), dtype=torch.int32, device=device
    )
    ready = torch.empty((layers, slots), dtype=torch.int32, device=device)
    floor = torch.tensor([clock << 3], dtype=torch.int32, device=device)
    results = []
    for num_ready in (2048, 26_624, 131_072, slots):
        taken = bench.time(
            lambda n=num_ready: fused.choose_victims(floor, priority, ready, counters, n),
            lambda: None,
        )
        results.append({"layers": layers, "slots": slots, "num_ready": num_ready} | taken)
        print(f"choose_victims, 61 layers, {num_ready} ready: {taken['median']:.1f} us", flush=True)
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
    device, start = torch.device("cuda"), time.perf_counter()
    torch.manual_seed(7)
    bench = CudaBench(replace(common.REAL, repeats=options.repeats, check_steps=6), device)
    report: dict[str, Any] = {
        "environment": environment() | {"commit": options.commit},
        "sizes": asdict(bench.sizes),
    }
    stages: dict[str, Callable[[], Any]] = {
        "check topk": lambda: check_topk(bench),
        "topk_us": lambda: topk_times(bench),
        "choose_victims_us": lambda: victim_times(bench),
    }
    for row_bytes in bench.sizes.row_bytes:
        host = HostPool(bench.sizes.layers, bench.sizes.host_slots // 64 * 64, row_bytes, device)
        common.fill_random(host.rows)
        stages = stages | {
            f"check make_resident {row_bytes}": partial(check_resident, bench, row_bytes, host),
            f"make_resident_us {row_bytes}": partial(all_resident_times, bench, row_bytes, host),
        }
        if row_bytes == 656:
            stages["lanes_us"] = partial(lanes_times, bench, host)
            stages["append_us"] = partial(append_times, bench, host)
        for name, stage in stages.items():
            if any(not check["ok"] for check in bench.checks):
                break
            report[name] = stage()
            report["checks"] = bench.checks
            options.out.write_text(json.dumps(report, indent=1) + "\n")
            print(f"-- {name}: {time.perf_counter() - start:.0f} s", flush=True)
        stages = {}
        host.close()
    failed = [check for check in bench.checks if not check["ok"]]
    print(f"wrote {options.out}; {len(failed)} of {len(bench.checks)} checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
