"""The cache's CUDA C++ kernels on one Hopper GPU: right first, then how long they take.

    python benchmarks/device/cache_ops.py --out cache_ops.json

- `make_resident` beside a bare gather of the same rows in the same run, by batch, rows missing and
  bytes a row; rows from 1 GiB and from 4.4 GiB of host memory (four layers in turn); from a cold L2
  cache, and with the selection in it, as top-k leaves it. In part beside Triton's op-by-op version.
- `append_rows`, `choose_victims` (lists kept, and made anew).
- What all of it adds to a decode step, a layer, arranged as the engine does.

The oracle is the reference manager, given the same state before each step; timed cases are checked
for where rows are and for their bytes. Times are those of CUDA graph replays, variants taking
turns, each replay with another selection, the state put back and the L2 cache overwritten before
it: a layer's share of a graph of several layers, each with tables and rows of its own.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from cache_state import CacheState, Selected
from torch import Tensor

import cache as common  # benchmarks/device/cache.py
from echokv.bench.report import environment
from echokv.cache.manager import CacheManager
from echokv.cache.ready import FREE_SHARE
from echokv.kernels.fused_layer import CURSOR, TOTALS, FusedLayers
from echokv.kernels.registry import load_kernels
from echokv.memory.pools import DevicePool, HostPool

DEVICE = torch.device("cuda")
LAYERS, HOST_SLOTS, DEVICE_SLOTS, TOPK = 4, 1_800_000 // 64 * 64, 200_000, 2048
BATCHES = (1, 13, 64)
ROWS = (37, 64, 512, 2665, 16_384)
NEAR_BYTES = 2**28  # of a layer: four of them are 1 GiB
SELECTIONS = 12

Run = Callable[[], object]


class Bench:
    """Both GPU backends, the clock, and what was found wrong."""

    def __init__(self, repeats: int) -> None:
        self.cuda = load_kernels("cuda", DEVICE)
        self.triton = load_kernels("triton", DEVICE)
        self.reference = load_kernels("reference", DEVICE)
        self.repeats = repeats
        self.checks: list[dict[str, Any]] = []
        self._flush = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)

    def check(self, name: str, ok: bool, **more: Any) -> None:
        """Note one verdict."""
        self.checks.append({"check": name, "ok": bool(ok)} | more)
        if not ok:
            print(f"WRONG: {name} {more}", flush=True)

    def time(
        self, runs: dict[str, Run], prepare: Callable[[int], object], last: Run | None = None
    ) -> dict[str, dict[str, float]]:
        """Spread of each run's graph, taking turns; microseconds.

        Args:
            runs: what to time.
            prepare: before each replay, told its number.
            last: after the L2 cache was overwritten.
        """
        graphs, samples = {}, {name: [] for name in runs}
        for name, run in runs.items():
            prepare(0)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run()
            torch.cuda.current_stream().wait_stream(stream)
            prepare(0)
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                run()
        number = 0
        for _ in range(self.repeats):
            for name, graph in graphs.items():
                prepare(number := number + 1)
                self._flush.zero_()
                if last is not None:
                    last()
                samples[name].append(common.clock(graph.replay, DEVICE))
        return {name: common.spread(taken) for name, taken in samples.items()}


def check_steps(bench: Bench, row_bytes: int, host: HostPool) -> None:
    """The fused op against the reference manager, given the same state when a step has begun."""
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    managers = [
        CacheManager(kernels, host, DevicePool(1, DEVICE_SLOTS, row_bytes, DEVICE))
        for kernels in (bench.cuda, bench.reference)
    ]
    ours, theirs = managers
    for step in range(6):
        batch = (1, 13, 13, 64, 13, 13)[step]
        ours.begin_step(most_rows=batch * (TOPK + 1))
        for name, value in vars(theirs.state).items():
            if name not in ("workspace", "slot_buffer"):
                value.copy_(getattr(ours.state, name))
        share = (0.5, 0.5, 0.03, 0.1, 0.03, 0.0)[step]
        wanted = common.next_selection(ours, batch, TOPK, share, generator)
        if step % 2:  # rows that requests share, and short ones
            wanted[1::2, : TOPK // 2] = wanted[:-1:2, : TOPK // 2][: len(wanted[1::2])]
            wanted[-1, TOPK // 3 :] = -1
        scores = torch.randn(wanted.shape, device=DEVICE, generator=generator)
        before = [manager.counters()[0] for manager in managers]
        found = [manager.make_resident(0, wanted, scores) for manager in managers]
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


class Recall:
    """One batch's buffers, and what runs over them; a bare gather has tables of its own.

    Args:
        bench: the backends.
        ours: the fused backend's state.
        theirs: Triton's, where it is timed too.
        batch: rows of a selection.
    """

    def __init__(
        self, bench: Bench, ours: CacheState, theirs: CacheState | None, batch: int
    ) -> None:
        self.bench, self.ours, self.theirs, self.batch = bench, ours, theirs, batch
        shape = (LAYERS, batch, TOPK)
        self.wanted = torch.zeros(shape, dtype=torch.int32, device=DEVICE)
        self.found = torch.zeros(shape, dtype=torch.int32, device=DEVICE)
        self.scores = torch.randn(shape[1:], device=DEVICE, generator=ours.generator)
        self.absent = torch.full((LAYERS, 20_000), -1, dtype=torch.int32, device=DEVICE)
        self.targets = torch.stack([ours.shuffled(DEVICE_SLOTS) for _ in range(LAYERS)])
        self.count = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def load(self, selection: list[Selected], *, begun: bool = True) -> None:
        """The state before the step, or when it has begun, and what it selects."""
        misses = selection[0].absent.shape[0]
        if self.theirs is not None:
            self.theirs.restore()
        self.ours.restore(taken=misses)
        if begun:
            self.ours.ready.begin_step(self.batch * (TOPK + 1), prefetches=False)
        for layer, one in enumerate(selection):
            self.wanted[layer].copy_(one.wanted)
            self.absent[layer, : one.absent.shape[0]].copy_(one.absent)
        self.count.fill_(misses)

    def warm(self) -> None:
        """The selection into the L2 cache."""
        self.wanted.add_(0)
        self.scores.add_(0)

    def run_cuda(self) -> None:
        """The fused op."""
        for layer in range(LAYERS):
            self.bench.cuda.fused.make_resident(
                self.wanted[layer], self.scores, self.ours.ready.use(layer), self.found[layer]
            )

    def run_triton(self) -> None:
        """Op by op."""
        assert self.theirs is not None
        for layer in range(LAYERS):
            self.theirs.manager.make_resident(layer, self.wanted[layer], self.scores)

    def run_gather(self) -> None:
        """The rows alone."""
        manager = self.ours.manager
        for layer in range(LAYERS):
            self.bench.cuda.recall(
                self.absent[layer], self.count, self.targets[layer],
                manager._host_pool.rows[layer], manager.rows(layer),
            )  # fmt: skip


def resident_times(
    bench: Bench, row_bytes: int, host: HostPool, cases: list[tuple[int, int]], *, triton: bool
) -> list[dict[str, Any]]:
    """A layer's make_resident, by batch, rows missing, span of host memory and state of L2."""
    pool = DevicePool(LAYERS, DEVICE_SLOTS, row_bytes, DEVICE)
    ours = CacheState(CacheManager(bench.cuda, host, pool))
    theirs = CacheState(CacheManager(bench.triton, host, pool)) if triton else None
    results = []
    for batch, misses in cases:
        recall = Recall(bench, ours, theirs, batch)
        runs: dict[str, Run] = {"gather": recall.run_gather, "cuda": recall.run_cuda}
        if theirs is not None and misses in (0, round(0.03 * batch * TOPK)):
            runs["triton"] = recall.run_triton
        for span in dict.fromkeys((NEAR_BYTES // row_bytes, HOST_SLOTS if misses else 0)):
            if span == 0:
                continue
            selections = [
                [ours.select(layer, batch, TOPK, misses, span) for layer in range(LAYERS)]
                for _ in range(SELECTIONS)
            ]
            recall.load(selections[0])
            recall.run_cuda()
            what = f"batch {batch}, {misses} rows of {row_bytes} B missing"
            for layer, one in enumerate(selections[0]):
                bench.check(f"{what}, layer {layer}", ours.verify(layer, one, recall.found[layer]))
            gib = span * row_bytes * LAYERS / 2**30
            for warm in (False, True):
                taken = bench.time(
                    runs,
                    lambda at, many=selections, recall=recall: recall.load(many[at % len(many)]),
                    recall.warm if warm else None,
                )
                for name, one in taken.items():
                    each = {key: value / LAYERS for key, value in one.items()}
                    results.append({
                        "variant": name, "batch": batch, "recalled_rows": misses,
                        "row_bytes": row_bytes, "gib": gib, "selection_in_l2": warm,
                        "GB_per_s": misses * row_bytes / each["median"] / 1e3,
                    } | each)  # fmt: skip
                line = ", ".join(
                    f"{name} {one['median'] / LAYERS:.1f}" for name, one in taken.items()
                )
                print(
                    f"{what}, from {gib:.1f} GiB{', selection in L2' * warm}: {line} us", flush=True
                )
    ours.restore()
    return results


def append_times(bench: Bench, host: HostPool) -> list[dict[str, Any]]:
    """A layer's append of one new row a request, by batch."""
    results = []
    pool = DevicePool(LAYERS, DEVICE_SLOTS, 656, DEVICE)
    states = {
        name: CacheState(CacheManager(kernels, host, pool))
        for name, kernels in (("cuda", bench.cuda), ("triton", bench.triton))
    }
    for batch in BATCHES:
        rows = torch.zeros((batch, 656), dtype=torch.uint8, device=DEVICE)
        new = states["cuda"].shuffled(HOST_SLOTS)[:batch].clone()

        def prepare(at: int, new: Tensor = new) -> None:
            new.copy_(states["cuda"].shuffled(HOST_SLOTS)[: new.shape[0]])
            for state in states.values():
                state.restore()

        def run(state: CacheState, new: Tensor = new, rows: Tensor = rows) -> None:
            for layer in range(LAYERS):
                state.manager.append(layer, new, rows, keep=new.shape[0])

        taken = bench.time({name: partial(run, one) for name, one in states.items()}, prepare)
        for name, one in taken.items():
            each = {key: value / LAYERS for key, value in one.items()}
            results.append({"variant": name, "batch": batch} | each)
        line = ", ".join(f"{name} {one['median'] / LAYERS:.1f}" for name, one in taken.items())
        print(f"append, batch {batch}: {line} us", flush=True)
    return results


def victim_times(bench: Bench) -> list[dict[str, Any]]:
    """choose_victims: a layer, and all layers of a model at once; lists made anew, and kept."""
    results, clock = [], 2000
    floor = torch.tensor([clock << 3], dtype=torch.int32, device=DEVICE)
    for layers in (1, 61):
        steps = torch.empty((layers, DEVICE_SLOTS), device=DEVICE).exponential_(1 / 250)
        priority = (clock - 1 - steps.clamp(max=1900).to(torch.int32)) << 3
        priority += torch.randint_like(priority, 8)
        cursor = torch.zeros((layers, CURSOR), dtype=torch.int32, device=DEVICE)
        everyone = torch.arange(DEVICE_SLOTS, device=DEVICE, dtype=torch.int32).repeat(layers, 1)
        cache = FusedLayers(
            floor=floor, priority=priority, ready=torch.zeros_like(priority), cursor=cursor,
            device_free=torch.zeros_like(priority, dtype=torch.uint8),
            device_to_host=everyone, host_to_device=everyone.clone(),
            totals=torch.zeros((layers, TOTALS), dtype=torch.int64, device=DEVICE),
        )  # fmt: skip
        run = partial(
            bench.cuda.fused.choose_victims, cache, 13 * (TOPK + 1), DEVICE_SLOTS // FREE_SHARE,
            partly=False,
        )  # fmt: skip
        for what, prepare in (("anew", lambda _, c=cursor: c.zero_()), ("kept", lambda _: None)):
            taken = bench.time({"cuda": run}, prepare)["cuda"]
            results.append({"layers": layers, "slots": DEVICE_SLOTS, "lists": what} | taken)
            print(f"choose_victims, {layers} layers, {what}: {taken['median']:.1f} us", flush=True)
    return results


Way = Literal["in line", "beside", "with the selection"]
"""How a step appends and recalls."""


class DecodeStep:
    """The cache's part of a decode step over some layers, beside products like a model's.

    A layer writes its new rows, reads 151 MB (for scores and top-k), makes its selection resident,
    makes its absorbed query by the engine's products of DeepSeek-V3.2's shapes, and then the rows
    would be read.
    """

    def __init__(self, bench: Bench, state: CacheState, batch: int, misses: int, span: int) -> None:
        self.state, self.batch = state, batch
        self.recall = Recall(bench, state, None, batch)
        self.selections = [
            [state.select(layer, batch, TOPK, misses, span) for layer in range(LAYERS)]
            for _ in range(SELECTIONS)
        ]
        self.new = state.shuffled(HOST_SLOTS)[:batch].clone()
        self.rows = torch.zeros((batch, 656), dtype=torch.uint8, device=DEVICE)
        half = torch.bfloat16
        self.hidden = torch.randn(batch, 1536, device=DEVICE, dtype=half)
        self.weights = [torch.randn(1536, 24_576, device=DEVICE, dtype=half) for _ in range(2)]
        self.kernels = bench.cuda
        self.q_b = [
            torch.randn(24_576, 1536, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(LAYERS)
        ]
        self.scales = torch.rand(24_576 // 128, 1536 // 128, device=DEVICE)
        self.absorb = torch.randn(LAYERS, 128, 128, 512, device=DEVICE, dtype=half)
        self.query = torch.empty(batch, 128, 512, device=DEVICE, dtype=half)
        ways: dict[str, tuple[Way | None, Way | None]] = {
            "begin alone": (None, None), "append in line": ("in line", None),
            "append beside": ("beside", None), "recall in line": (None, "in line"),
            "recall beside": (None, "beside"), "inline": ("in line", "in line"),
            "append beside, recall beside": ("beside", "beside"),
            "beside": ("with the selection", "beside"),
        }  # fmt: skip
        self.runs: dict[str, Run] = {"none": self._work}
        for name, (append, recall) in ways.items():
            self.runs[name] = partial(self._run, append, recall)

    def prepare(self, at: int) -> None:
        """Another selection, and other new rows."""
        self.recall.load(self.selections[at % len(self.selections)], begun=False)
        self.new.copy_(self.state.shuffled(HOST_SLOTS)[: self.batch])

    def _work(self) -> None:
        for layer in range(LAYERS):
            self._before_selection()
            self._make_query(layer)

    def _before_selection(self) -> None:
        for weight in self.weights:
            torch.mm(self.hidden, weight)

    def _make_query(self, layer: int) -> None:
        heads = self.kernels.fp8_linear(self.hidden, self.q_b[layer], self.scales)
        nope = heads.view(self.batch, 128, 192)[:, :, :128].transpose(0, 1)
        torch.bmm(nope, self.absorb[layer], out=self.query.transpose(0, 1))

    def _run(self, append: Way | None, recall: Way | None) -> None:
        """One step; each part beside the products, in line with them, or (None) left out."""
        manager, scores = self.state.manager, self.recall.scores
        manager.begin_step(most_rows=self.batch * (TOPK + 1))
        for layer in range(LAYERS):
            if append is not None:
                manager.append(
                    layer, self.new, self.rows, keep=self.batch, beside=append == "beside",
                    until_selected=append == "with the selection",
                )  # fmt: skip
            self._before_selection()
            wanted = self.recall.wanted[layer]
            if recall == "beside":
                manager.recall_ahead(layer, wanted, scores)
            elif recall is not None:
                manager.make_resident(layer, wanted, scores)
            self._make_query(layer)
            manager.wait()
        manager.end_step()


def step_times(bench: Bench, host: HostPool) -> list[dict[str, Any]]:
    """What cache management adds to a decode step, a layer."""
    results = []
    pool = DevicePool(LAYERS, DEVICE_SLOTS, 656, DEVICE)
    state = CacheState(CacheManager(bench.cuda, host, pool))
    for batch, misses in ((1, 0), (13, 0), (13, 37), (13, 533), (13, 2665)):
        for span in dict.fromkeys((NEAR_BYTES // 656, HOST_SLOTS if misses else 0)):
            if span == 0:
                continue
            case = DecodeStep(bench, state, batch, misses, span)
            taken = bench.time(case.runs, case.prepare)
            work = taken.pop("none")["median"] / LAYERS
            gib = span * 656 * LAYERS / 2**30
            for name, one in taken.items():
                each = {key: value / LAYERS - work for key, value in one.items()}
                results.append({"batch": batch, "recalled_rows": misses, "gib": gib, "way": name,
                                "work_us": work} | each)  # fmt: skip
            line = ", ".join(
                f"{name} {one['median'] / LAYERS - work:.1f}" for name, one in taken.items()
            )
            print(f"step, batch {batch}, {misses} rows missing, from {gib:.1f} GiB:"
                  f" {line} us a layer beside {work:.1f}", flush=True)  # fmt: skip
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
    bench = Bench(options.repeats)
    torch.manual_seed(7)
    report: dict[str, Any] = {
        "environment": environment() | {"commit": options.commit},
        "sizes": {"layers": LAYERS, "host_slots": HOST_SLOTS, "device_slots": DEVICE_SLOTS,
                  "topk": TOPK, "repeats": options.repeats},
    }  # fmt: skip
    some = [(batch, round(share * batch * TOPK)) for batch in BATCHES for share in (0.0, 0.03, 0.1)]
    cases = {656: [*some, *((13, rows) for rows in ROWS)], 1152: [(13, rows) for rows in ROWS[2:]]}
    for row_bytes in (656, 1152):
        host = HostPool(LAYERS, HOST_SLOTS, row_bytes, DEVICE)
        common.fill_random(host.rows)
        stages: dict[str, Run] = {
            f"check {row_bytes}": partial(check_steps, bench, row_bytes, host),
            f"make_resident_us {row_bytes}": partial(
                resident_times, bench, row_bytes, host, list(dict.fromkeys(cases[row_bytes])),
                triton=row_bytes == 656,
            ),
        }  # fmt: skip
        if row_bytes == 656:
            stages["step_us"] = partial(step_times, bench, host)
            stages["append_us"] = partial(append_times, bench, host)
            stages["choose_victims_us"] = partial(victim_times, bench)
        common.run_stages(stages, report, bench.checks, options.out)
        host.close()
    return common.verdict(bench.checks, options.out)


if __name__ == "__main__":
    sys.exit(main())
