"""The CUDA C++ kernels on one Hopper GPU: right at real sizes first, then how long they take.

    python benchmarks/device/cuda_cache.py --out cuda_cache.json

- `topk` beside Triton's and `torch.topk`; the oracle is a stable sort.
- `make_resident` (CUDA C++, one launch) beside the Triton ops that it stands for and beside a bare
  gather of as many rows, by batch, share of missing rows and row size. The oracle is the reference
  manager, given the same state before each step.
- What all of it adds to a decode step, a layer, victims included.
- `choose_victims`: a layer, and all layers at once, as at the start of a step.

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

MISSING = (0.0, 0.03, 0.10)
RECALLS = (0, 64, 512, 2665, 16384)
TOPK_SHAPES = (
    (13, 98_304),
    (1, 1_000_064),
    (1, 98_304),
    (13, 32_768),
    (64, 98_304),
    (1024, 8192),
    (1, 4096),
)
K = 2048
PAPERS_MISSES = 37 / (13 * K)
"""Of 13 requests, the share that is 37 rows a layer: the paper's 0.9986, averaged over layers."""


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
        for width in (64, 8192, 98_304, 1_000_064):
            lens = sorted({n for n in (0, 1, K - 1, K, K + 1, width - 1, width) if n <= width})
            with bench.device:
                scores = torch.stack([make(width) for _ in lens])
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
        warm = {"cuda warm": lambda op=ops["cuda"], one=scores[0]: [op(one) for _ in range(4)]}
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
    """The fused op beside a bare gather of as many rows; in part beside Triton's ops too."""
    entries = 13 * bench.sizes.topk  # of the cases that recall as many rows as the gather's table
    cases = [(batch, share) for batch in bench.sizes.batches for share in MISSING]
    cases += [(13, PAPERS_MISSES), *((13, rows / entries) for rows in RECALLS[1:])]
    ours = resident_times(bench, bench.cuda, host, row_bytes, cases)
    counts = sorted({row["recalled_rows"] for row in ours} | set(RECALLS))
    bare = gather_times(bench, row_bytes, host, counts)
    few = [case for case in cases[:-5] if case[1] <= 0.03]
    theirs = resident_times(bench, bench.kernels, host, row_bytes, few) if row_bytes == 656 else []
    triton = {(row["batch"], row["missing"]): row for row in theirs}
    results = []
    for mine in ours:
        gather, other = bare[mine["recalled_rows"]], triton.get((mine["batch"], mine["missing"]))
        rows = {"cuda": mine, "gather": gather} | ({"triton": other} if other else {})
        what = f"batch {mine['batch']}, {mine['missing']:.2%} missing, {mine['recalled_rows']} rows"
        line = ", ".join(f"{name} {row['median']:.1f}" for name, row in rows.items())
        print(f"make_resident {row_bytes} B, {what}: {line} us", flush=True)
        for name, row in rows.items():
            results.append(mine | {"row_bytes": row_bytes, "variant": name} | row)
    for rows, taken in bare.items():
        speed = {"GB_per_s": rows * row_bytes / taken["median"] / 1e3}
        results.append({"row_bytes": row_bytes, "variant": "gather", "recalled_rows": rows}
                       | speed | taken)  # fmt: skip
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


def victim_times(bench: CudaBench) -> list[dict[str, Any]]:
    """choose_victims: a layer, and all of them at once, as at the start of a step."""
    device, slots = bench.device, bench.sizes.device_slots
    return [row for layers in (1, 61) for row in victims_of(bench, layers, slots, device)]


def victims_of(
    bench: CudaBench, layers: int, slots: int, device: torch.device
) -> list[dict[str, Any]]:
    """choose_victims over some layers at once."""
    counters = fused.victim_workspace(layers, device)
    clock = 2000
    steps = torch.empty((layers, slots), device=device).exponential_(1 / 250).clamp(max=1900)
    priority = ((clock - 1 - steps.to(torch.int32)) << 3) + torch.randint(
        0, 8, (layers, slots), dtype=torch.int32, device=device
    )
    ready = torch.empty((layers, slots), dtype=torch.int32, device=device)
    floor = torch.tensor([clock << 3], dtype=torch.int32, device=device)
    results = []
    for num_ready in (26_624, slots):
        taken = bench.time(
            lambda n=num_ready: fused.choose_victims(floor, priority, ready, counters, n),
            lambda: None,
        )
        results.append({"layers": layers, "slots": slots, "num_ready": num_ready} | taken)
        print(
            f"choose_victims, {layers} layers, {num_ready} ready: {taken['median']:.1f} us",
            flush=True,
        )
    return results


class DecodeStep:
    """The cache's part of a decode step over a few layers, beside work like a model's.

    Two managers go through the same steps: with the fused ops, and on Triton's.
    """

    def __init__(self, bench: CudaBench, host: HostPool, batch: int, missing: float) -> None:
        sizes, device = bench.sizes, bench.device
        self.missing, self.layers, self.host = missing, range(sizes.layers), host
        self.generator = torch.Generator(device=device).manual_seed(5)
        self.managers = {
            name: CacheManager(
                kernels, host, DevicePool(sizes.layers, sizes.device_slots, 656, device)
            )
            for name, kernels in (("cuda", bench.cuda), ("triton", bench.kernels))
        }
        self.rows = torch.zeros((batch, 656), dtype=torch.uint8, device=device)
        self.scores = torch.randn((batch, sizes.topk), device=device, generator=self.generator)
        self.new = common.random_slots(host.num_slots, batch, self.generator)
        self.wanted = [
            HostSlots(torch.zeros((batch, sizes.topk), dtype=torch.int32, device=device))
            for _ in self.layers
        ]
        self.left = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
        self.right = torch.randn(4096, 1024, device=device, dtype=torch.bfloat16)
        self._select(1.0, first=True)

    def prepare(self) -> None:
        """Another selection, of which a share is absent, found alike by both."""
        self.run("cuda")  # what was selected last is resident now
        self._select(self.missing)
        truth = self.managers["cuda"].state
        for name, manager in self.managers.items():
            if name != "cuda":
                for field, value in vars(truth).items():
                    getattr(manager.state, field).copy_(value)

    def run(self, name: str | None) -> None:
        """One step; with no manager, the work alone."""
        manager = self.managers[name] if name else None
        if manager is not None:
            manager.begin_step(most_rows=self.scores.numel() + self.scores.shape[0])
        for layer in self.layers:
            if manager is not None:
                manager.append(layer, self.new, self.rows, keep=self.new.shape[0])
                manager.make_resident(layer, self.wanted[layer], self.scores)
            torch.mm(self.left, self.right)
        if manager is not None:
            manager.end_step()

    def _select(self, missing: float, *, first: bool = False) -> None:
        self.new.copy_(common.random_slots(self.host.num_slots, self.new.shape[0], self.generator))
        for layer, slots in enumerate(self.wanted):
            slots.copy_(
                common.next_selection(
                    self.managers["cuda"], *slots.shape, missing, self.generator, layer=layer,
                    previous=None if first else slots,
                )
            )  # fmt: skip


def step_times(bench: CudaBench, host: HostPool) -> list[dict[str, Any]]:
    """What cache management adds to a decode step, a layer: append, make_resident, victims.

    Each layer also multiplies matrices for some 50 us; the same step without a cache is taken off.
    """
    results = []
    for batch, missing in ((13, PAPERS_MISSES), (13, 0.0), (1, 0.0), (13, 0.03)):
        case = DecodeStep(bench, host, batch, missing)
        runs = {name: partial(case.run, name) for name in (None, *case.managers)}
        taken = time_interleaved(bench, runs, case.prepare)
        work = taken.pop(None)["median"] / len(case.layers)
        recalled = round(missing * batch * bench.sizes.topk)
        for name, one in taken.items():
            each = {key: value / len(case.layers) - work for key, value in one.items()}
            results.append(
                {"batch": batch, "missing": missing, "recalled_rows": recalled, "victims": name,
                 "work_us": work} | each
            )  # fmt: skip
            print(f"step, batch {batch}, {recalled} rows missing, victims {name}:"
                  f" {each['median']:.1f} us a layer beside {work:.1f}", flush=True)  # fmt: skip
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
    bench = CudaBench(replace(common.REAL, repeats=options.repeats, check_steps=3), device)
    report: dict[str, Any] = {
        "environment": environment() | {"commit": options.commit},
        "sizes": asdict(bench.sizes),
    }
    stages: dict[str, Callable[[], Any]] = {
        "check topk": lambda: check_topk(bench),
        "topk_us": lambda: topk_times(bench),
    }
    for row_bytes in bench.sizes.row_bytes:
        host = HostPool(bench.sizes.layers, bench.sizes.host_slots // 64 * 64, row_bytes, device)
        common.fill_random(host.rows)
        stages = stages | {
            f"check make_resident {row_bytes}": partial(check_resident, bench, row_bytes, host),
            f"make_resident_us {row_bytes}": partial(all_resident_times, bench, row_bytes, host),
        }
        if row_bytes == 656:
            stages["step_us"] = partial(step_times, bench, host)
            stages["append_us"] = partial(append_times, bench, host)
            stages["choose_victims_us"] = partial(victim_times, bench)
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
