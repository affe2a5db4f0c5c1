"""The cache ops on one GPU: first that they are right at real sizes, then how long they take.

    python benchmarks/device/cache.py --output cache.json          # on a GPU
    TRITON_INTERPRET=1 python benchmarks/device/cache.py --small --output small.json   # anywhere

Correctness comes first and gates the rest: Triton against the reference ops entry by entry over a
sequence of steps, rows byte by byte, offsets past 2^32. Times are medians of CUDA graph replays
with the L2 cache overwritten before each. `--small` runs the same code at toy sizes; its times
mean nothing.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echokv.bench.report import environment
from echokv.cache.manager import CacheManager
from echokv.kernels.registry import load_kernels
from echokv.log import progress
from echokv.memory.pinned import PinnedBuffer
from echokv.memory.pools import DevicePool, HostPool
from echokv.memory.slots import HostSlots

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured: real sizes, or toy ones for a machine without a GPU."""

    layers: int
    host_slots: int
    device_slots: int
    topk: int
    batches: tuple[int, ...]
    recalls: tuple[int, ...]
    far_slots: int  # a pool whose byte offsets pass 2^32 at 656 B
    check_steps: int
    repeats: int
    row_bytes: tuple[int, ...] = (656, 1152)
    missing: tuple[float, ...] = (0.0, 0.01, 0.03, 0.10)


REAL = Sizes(
    layers=4,
    host_slots=1_800_000,
    device_slots=200_000,
    topk=2048,
    batches=(1, 13, 64),
    recalls=(64, 512, 2665, 16384),
    far_slots=7_000_064,
    check_steps=12,
    repeats=100,
)
SMALL = Sizes(
    layers=2,
    host_slots=2048,
    device_slots=300,
    topk=32,
    batches=(1, 4),
    recalls=(8, 64),
    far_slots=1024,
    check_steps=3,
    repeats=2,
)


class Bench:
    """One backend on one device at given sizes."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes = sizes
        self.device = device
        self.kernels = load_kernels("triton", device)
        self.reference = load_kernels("reference", device)
        flush = 2**28 if device.type == "cuda" else 1  # bytes, five times an H200's L2
        self._flush = torch.empty(flush, dtype=torch.uint8, device=device)

    def pools(self, layers: int, row_bytes: int) -> tuple[HostPool, DevicePool]:
        """Host rows full of random bytes, device rows full of poison."""
        host = HostPool(layers, self.sizes.host_slots // 64 * 64, row_bytes, self.device)
        fill_random(host.rows)
        device = DevicePool(layers, self.sizes.device_slots, row_bytes, self.device)
        device.rows.fill_(0xFF)
        return host, device

    def time(self, run: Callable[[], object], prepare: Callable[[], object]) -> dict[str, float]:
        """Microseconds of run, each time after prepare; a graph replay on a GPU."""
        if self.device.type == "cuda":
            return self._time_graph(run, prepare)
        times = []
        for _ in range(self.sizes.repeats):
            prepare()
            times.append(clock(run, self.device))
        return spread(times)

    def _time_graph(
        self, run: Callable[[], object], prepare: Callable[[], object]
    ) -> dict[str, float]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles what isn't yet
                prepare()
                run()
        torch.cuda.current_stream().wait_stream(stream)
        prepare()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times = []
        for _ in range(self.sizes.repeats):
            prepare()
            self._flush.zero_()
            times.append(clock(graph.replay, self._flush.device))
        return spread(times)


def main() -> int:
    """Run, write JSON, say where; 1 when something was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", help="of the code that runs; default: the git checkout's")
    parser.add_argument("--small", action="store_true", help="toy sizes, for a CPU")
    parser.add_argument("--pin-gib", type=float, default=32.0, help="GiB to pin both ways; 0: skip")
    options = parser.parse_args()
    device = torch.device("cpu" if options.small else "cuda")
    bench = Bench(SMALL if options.small else REAL, device)
    report: dict[str, Any] = environment(options.commit) | {"sizes": asdict(bench.sizes)}
    report["correct"] = correctness(bench)
    if all(check["ok"] for check in report["correct"]):
        report["make_resident_us"] = make_resident_times(bench)
        report["append_us"] = append_times(bench)
        report["recall"] = recall_times(bench)
        if options.pin_gib and device.type == "cuda":
            report["pinning"] = pinning_times(options.pin_gib)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {options.output}")
    failed = [check for check in report["correct"] if not check["ok"]]
    print(
        f"{len(failed)} of {len(report['correct'])} checks failed: {failed}"
        if failed
        else "correct"
    )
    return 1 if failed else 0


# Correctness.


def correctness(bench: Bench) -> list[dict[str, Any]]:
    """Every check with its name and verdict."""
    checks = []
    for row_bytes in bench.sizes.row_bytes:
        checks += [against_reference(bench, row_bytes, rebase) for rebase in (False, True)]
    checks.append(far_offsets(bench))
    return checks


def against_reference(bench: Bench, row_bytes: int, rebase: bool) -> dict[str, Any]:
    """Two managers, one on each backend, through the same steps: the same integers and bytes."""
    sizes, device = bench.sizes, bench.device
    generator = torch.Generator(device=device).manual_seed(1)
    host, triton_pool = bench.pools(1, row_bytes)
    reference_pool = DevicePool(1, sizes.device_slots, row_bytes, device)
    reference_pool.rows.fill_(0xFF)
    ours = CacheManager(bench.kernels, host, triton_pool)
    theirs = CacheManager(bench.reference, host, reference_pool)
    if rebase:
        for manager in (ours, theirs):
            manager.state.clock.fill_((3 << 26) - sizes.check_steps // 2)
    differences: list[str] = []
    what = f"checking {row_bytes} B rows"
    for step in progress(range(sizes.check_steps), total=sizes.check_steps, what=what):
        batch = sizes.batches[step % len(sizes.batches)]
        keep = min(batch * 16, sizes.device_slots - batch * sizes.topk)
        new = random_slots(host.num_slots, keep, generator)
        rows = torch.randint(
            0, 256, (keep, row_bytes), dtype=torch.uint8, device=device, generator=generator
        )
        wanted = next_selection(ours, batch, sizes.topk, 0.5, generator)
        scores = torch.randn(wanted.shape, device=device, generator=generator)
        found = []
        for manager in (ours, theirs):
            manager.begin_step()
            manager.append(0, new, rows, keep=keep)
            found.append(manager.make_resident(0, wanted, scores))
        if not torch.equal(*found):
            differences.append(f"step {step}: device slots")
        for name, value in vars(ours.state).items():
            if name != "workspace" and not torch.equal(value, getattr(theirs.state, name)):
                differences.append(f"step {step}: {name}")
        gone = random_slots(host.num_slots, sizes.topk, generator)
        for manager in (ours, theirs):
            manager.release(gone)
    if ours.counters() != theirs.counters():
        differences.append("counters")
    if not torch.equal(triton_pool.rows, reference_pool.rows):
        differences.append("device rows")
    ours.check()
    host.close()
    name = f"Triton equals reference, {row_bytes} B rows{', rebased' if rebase else ''}"
    return {"check": name, "ok": not differences, "differences": differences[:8]}


def far_offsets(bench: Bench) -> dict[str, Any]:
    """Rows whose byte offsets lie past 2^31 and 2^32 in both pools."""
    slots, device = bench.sizes.far_slots // 64 * 64, bench.device
    host = HostPool(1, slots, 656, device)
    pool = DevicePool(1, slots, 656, device)
    wanted = [0, slots // 2, *(offset // 656 + 1 for offset in (2**31, 2**32)), slots - 1]
    wanted = sorted({slot % slots for slot in wanted})
    where = torch.tensor(wanted, dtype=torch.int32, device=device)
    rows = torch.randint(0, 256, (len(wanted), 656), dtype=torch.uint8, device=device)
    absent = torch.full((slots,), -1, dtype=torch.int32, device=device)
    bench.kernels.write_rows(rows, where, absent, host.rows[0], pool.rows[0])
    buffer = absent.clone()
    buffer[: len(wanted)] = where.flip(0)
    count = torch.tensor([len(wanted)], dtype=torch.int32, device=device)
    bench.kernels.recall(where, count, buffer, host.rows[0], pool.rows[0])
    if device.type == "cuda":
        torch.cuda.synchronize()
    in_host = torch.equal(host.rows[0, where.long().cpu()], rows.cpu())
    in_pool = torch.equal(pool.rows[0, where.flip(0).long()], rows)
    host.close()
    name = f"offsets up to byte {slots * 656}"
    return {"check": name, "ok": in_host and in_pool, "in_host": in_host, "in_pool": in_pool}


# Times.


def make_resident_times(bench: Bench) -> list[dict[str, Any]]:
    """A layer's make_resident, by batch and share of missing rows; layers share one graph."""
    sizes, results = bench.sizes, []
    cases = [(rb, b, m) for rb in sizes.row_bytes for b in sizes.batches for m in sizes.missing]
    for row_bytes in sizes.row_bytes:
        host, pool = bench.pools(sizes.layers, row_bytes)
        manager = CacheManager(bench.kernels, host, pool)
        mine = [case for case in cases if case[0] == row_bytes]
        for _, batch, missing in progress(mine, total=len(mine), what=f"make_resident {row_bytes}"):
            times, counts = time_selections(bench, manager, batch, missing)
            results.append({"row_bytes": row_bytes, "batch": batch, "missing": missing} | times)
            results[-1]["recalled_rows"] = counts
        host.close()
    return results


def time_selections(
    bench: Bench, manager: CacheManager, batch: int, missing: float
) -> tuple[dict[str, float], float]:
    """Microseconds a layer, and rows recalled a layer and step."""
    sizes, device = bench.sizes, bench.device
    generator = torch.Generator(device=device).manual_seed(2)
    wanted = [
        HostSlots(torch.empty((batch, sizes.topk), dtype=torch.int32, device=device))
        for _ in range(sizes.layers)
    ]
    scores = torch.randn((batch, sizes.topk), device=device, generator=generator)
    for layer, slots in enumerate(wanted):
        slots.copy_(next_selection(manager, batch, sizes.topk, 1.0, generator, layer=layer))
    manager.begin_step()
    for layer, slots in enumerate(wanted):
        manager.make_resident(layer, slots, scores)

    def prepare() -> None:
        for layer, slots in enumerate(wanted):
            slots.copy_(
                next_selection(
                    manager, batch, sizes.topk, missing, generator, layer=layer, previous=slots
                )
            )

    def run() -> None:
        manager.begin_step()
        for layer, slots in enumerate(wanted):
            manager.make_resident(layer, slots, scores)

    times = bench.time(run, prepare)
    before = manager.counters()[0].recalled
    prepare()
    run()
    recalled = manager.counters()[0].recalled - before
    return {name: value / sizes.layers for name, value in times.items()}, recalled


def append_times(bench: Bench) -> list[dict[str, Any]]:
    """A layer's append of one new row a request, by batch."""
    sizes, results = bench.sizes, []
    for row_bytes in sizes.row_bytes:
        host, pool = bench.pools(sizes.layers, row_bytes)
        manager = CacheManager(bench.kernels, host, pool)
        generator = torch.Generator(device=bench.device).manual_seed(3)
        for batch in sizes.batches:
            times = time_append(bench, manager, batch, generator)
            results.append({"row_bytes": row_bytes, "batch": batch} | times)
        host.close()
    return results


def time_append(
    bench: Bench, manager: CacheManager, batch: int, generator: torch.Generator
) -> dict[str, float]:
    """Microseconds a layer."""
    limit, row_bytes = manager.state.host_slots, manager.rows(0).shape[1]
    rows = torch.zeros((batch, row_bytes), dtype=torch.uint8, device=bench.device)
    new = random_slots(limit, batch, generator)
    times = bench.time(
        lambda: append_all(manager, new, rows, batch),
        lambda: new.copy_(random_slots(limit, batch, generator)),
    )
    return {name: value / bench.sizes.layers for name, value in times.items()}


def append_all(manager: CacheManager, new: HostSlots, rows: Tensor, keep: int) -> None:
    """Append the same rows in every layer."""
    manager.begin_step()
    for layer in range(manager.state.num_layers):
        manager.append(layer, new, rows, keep=keep)


def recall_times(bench: Bench) -> list[dict[str, Any]]:
    """The recall op alone, random rows, with its bandwidth."""
    sizes, results = bench.sizes, []
    for row_bytes in sizes.row_bytes:
        host, pool = bench.pools(1, row_bytes)
        for rows in progress(sizes.recalls, total=len(sizes.recalls), what=f"recall {row_bytes}"):
            times = time_recall(bench, host, pool, rows)
            speed = rows * row_bytes / times["median"] / 1e3
            results.append({"row_bytes": row_bytes, "rows": rows, "GB_per_s": speed} | times)
        host.close()
    return results


def time_recall(bench: Bench, host: HostPool, pool: DevicePool, rows: int) -> dict[str, float]:
    """Microseconds to copy `rows` rows, of as many as a large selection could ask for."""
    generator = torch.Generator(device=bench.device).manual_seed(4)
    sources = random_slots(host.num_slots, max(bench.sizes.recalls), generator)
    buffer = torch.full((pool.num_slots,), -1, dtype=torch.int32, device=bench.device)
    count = torch.tensor([rows], dtype=torch.int32, device=bench.device)

    def prepare() -> None:
        sources.copy_(random_slots(host.num_slots, sources.shape[0], generator))
        buffer[:rows] = random_slots(pool.num_slots, rows, generator)

    return bench.time(
        lambda: bench.kernels.recall(sources, count, buffer, host.rows[0], pool.rows[0]), prepare
    )


def pinning_times(gib: float) -> dict[str, float]:
    """Seconds to get so much host memory ready: ours, then torch's, then ours again."""
    nbytes, seconds = int(gib * GIB), {"gib": gib}

    def ours(name: str) -> None:
        start = time.perf_counter()
        buffer = PinnedBuffer(nbytes, what="benchmark pool", flag="--pin-gib")
        seconds[name] = time.perf_counter() - start
        buffer.close()

    ours("ours_first")
    start = time.perf_counter()
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    seconds["torch_pin_memory"] = time.perf_counter() - start
    del pinned
    ours("ours_again")
    return seconds


# Small things.


def next_selection(
    manager: CacheManager,
    batch: int,
    topk: int,
    missing: float,
    generator: torch.Generator,
    *,
    layer: int = 0,
    previous: Tensor | None = None,
) -> HostSlots:
    """A selection of distinct host slots of which a share is absent and the rest resident."""
    entries = batch * topk
    fresh = round(entries * missing)
    where = manager.state.host_to_device[layer]
    absent = shuffled((where < 0).nonzero().squeeze(1), generator)
    if previous is None:
        resident = shuffled((where >= 0).nonzero().squeeze(1), generator)
    else:
        resident = shuffled(previous.flatten(), generator)
    fresh = max(fresh, entries - resident.shape[0])
    chosen = torch.cat([absent[:fresh], resident[: entries - fresh]])
    return HostSlots(shuffled(chosen, generator).to(torch.int32).view(batch, topk))


def shuffled(values: Tensor, generator: torch.Generator) -> Tensor:
    """The same values in random order."""
    order = torch.randperm(values.shape[0], device=values.device, generator=generator)
    return values[order]


def random_slots(limit: int, count: int, generator: torch.Generator) -> HostSlots:
    """Distinct slots below limit."""
    order = torch.randperm(limit, device=generator.device, generator=generator)
    return HostSlots(order[:count].to(torch.int32))


def fill_random(rows: Tensor) -> None:
    """Random bytes in every row, cheaply: each row of a layer differs from all others."""
    pattern = torch.randint(0, 256, rows.shape[2:], dtype=torch.uint8)
    numbers = torch.arange(rows.shape[1], dtype=torch.int32).view(torch.uint8).view(-1, 4)
    for layer in rows:
        layer.copy_(pattern.expand_as(layer))
        layer[:, :4] = numbers
        pattern = pattern.flip(0)


def run_stages(
    stages: Mapping[str, Callable[[], Any]],
    report: dict[str, Any],
    checks: list[dict[str, Any]],
    out: Path,
) -> None:
    """Run stages in turn while all checks hold, and write what there is after each.

    Args:
        stages: by the report's key for what they return.
        report: theirs is added, and the checks.
        checks: to which stages add.
        out: JSON file to write.
    """
    start = time.perf_counter()
    for name, stage in stages.items():
        if not all(check["ok"] for check in checks):
            break
        report[name] = stage()
        report["checks"] = checks
        out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"-- {name}: {time.perf_counter() - start:.0f} s", flush=True)


def verdict(checks: list[dict[str, Any]], out: Path) -> int:
    """Say how many checks failed; the exit status."""
    failed = sum(not check["ok"] for check in checks)
    print(f"wrote {out}; {failed} of {len(checks)} checks failed")
    return 1 if failed else 0


def clock(run: Callable[[], object], device: torch.device) -> float:
    """Microseconds of a graph's replay, or of anything else on the current stream."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def spread(times: list[float]) -> dict[str, float]:
    """Median and the tenth and ninetieth percentiles."""
    ordered = sorted(times)
    tenth = len(ordered) // 10
    return {
        "median": statistics.median(ordered),
        "p10": ordered[tenth],
        "p90": ordered[-1 - tenth],
    }


if __name__ == "__main__":
    sys.exit(main())
