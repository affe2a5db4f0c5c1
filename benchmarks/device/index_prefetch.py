"""Indexer, top-k and recall of a decode step's layer on one Hopper GPU, with and without prefetch.

    python benchmarks/device/index_prefetch.py --out index_prefetch.json

Keys and queries are random, so the selection is spread evenly over the context. Before each replay
the given share of the selection is put into the device pool, among rows that are older. The
prediction is the score of rank 1.05 k: as if the k-th score had fallen a little since. Translating
positions to host slots is left out on both sides. "off, all resident" has nothing to recall: what a
variant takes longer than it is recall time that is still exposed. "late" also fetches on a second
stream, while the top-k runs, what the scores' kernel hadn't begun with; x2 has twice the budget.

Times are a layer's share of a CUDA graph over several layers, each with pages, state and rows of
its own; medians of replays with the L2 cache overwritten before each, variants in turn.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from index_scores import FMT, Case, make_case  # benchmarks/device/index_scores.py
from torch import Tensor

from echokv.bench.report import environment
from echokv.cache.manager import CacheManager
from echokv.kernels.cuda import index_scores as cuda
from echokv.kernels.cuda.fetch_listed import candidate_lists
from echokv.kernels.prefetch_args import Candidates
from echokv.kernels.cuda.topk import topk
from echokv.kernels.fused_layer import TOTALS, FusedLayer
from echokv.kernels.reference.name_rows import positions_to_host_slots
from echokv.kernels.registry import load_kernels
from echokv.memory.pools import DevicePool, HostPool
from echokv.memory.slots import HostSlots

K = 2048
CLOCK = 1000
HIT_RATES = (0.5, 0.9, 0.97)
SHAPES = tuple((rows, length) for rows in (1, 2, 13) for length in (32_768, 65_536, 98_304))
BYTES_PER_TOKEN = 1.64  # that PCIe moves while one token's key is read; see docs/prefetch.md
LEAST = 16
UNIT = 65536


class Segment:
    """One shape: layers, their cache, and what they will select.

    Args:
        rows: requests of the step.
        length: of each context.
        row_bytes: a KV row.
        layers: in a graph.
    """

    def __init__(self, rows: int, length: int, row_bytes: int, layers: int) -> None:
        device = torch.device("cuda")
        self.kernels = load_kernels("cuda", device)
        self.case: Case = make_case([length] * rows, 64, layers, device)
        num_pages = self.case.pages[0].shape[0]
        self.host = HostPool(layers, num_pages * 64, row_bytes, device)
        self.slots = min(max(4 * rows * K, 16_384), rows * length // 2)
        pool = DevicePool(layers, self.slots, row_bytes, device)
        self.manager = CacheManager(self.kernels, self.host, pool)
        self.totals = torch.zeros((layers, TOTALS), dtype=torch.int64, device=device)
        self.request_slots = torch.arange(rows, dtype=torch.int32, device=device)
        self.enabled = torch.ones(rows, dtype=torch.int32, device=device)
        self.length, self.row_bytes = length, row_bytes
        self.side = torch.cuda.Stream(priority=-1)
        self.lists = candidate_lists(device)
        self.found: dict[tuple[int, int], tuple[Candidates, Tensor]] = {}
        self.wanted, self.scores, self.thresholds, self.ranked, self.below = [], [], [], [], []
        for layer in range(layers):
            scores = self.case.run(cuda.index_scores, layer)
            positions, _ = self.kernels.topk(scores, self.case.lens, K)
            self.scores.append(scores.gather(1, positions.long()))
            slots = positions_to_host_slots(positions, self.case.rows, self.case.tables)
            self.wanted.append(HostSlots(slots.contiguous()))
            self.thresholds.append(torch.zeros(rows, device=device))
            self.ranked.append(scores.topk(4 * K, dim=1))
            below = self.ranked[-1].indices[:, K:].int()
            slots = positions_to_host_slots(below.contiguous(), self.case.rows, self.case.tables)
            self.below.append(slots)

    def predict(self, ratios: list[float] | None) -> None:
        """Predictions that so many times k rows reach; None: exactly the k-th scores."""
        for layer, ranked in enumerate(self.ranked):
            rows = ranked.values.shape[0]
            times = random.choices(ratios, k=rows) if ratios else [1.0] * rows
            for row, ratio in enumerate(times):
                rank = min(max(round(ratio * K), 1), 4 * K) - 1
                self.thresholds[layer][row] = ranked.values[row, rank]

    def prepare(self, hit_rate: float, near: list[float] | None = None) -> None:
        """Fill every layer's pool, so that this share of the selection is there.

        near: by eighths of k from rank k on, shares that are absent.
        """
        state = self.manager.state
        device = state.priority.device
        state.clock.fill_(CLOCK)
        for layer, wanted in enumerate(self.wanted):
            wanted = wanted.flatten().long()
            order = torch.randperm(wanted.numel(), device=device)
            hits = wanted[order[: round(hit_rate * wanted.numel())]]
            if near is not None:
                below = self.below[layer].long()
                share = torch.tensor(near, device=device).repeat_interleave(
                    below.shape[1] // len(near)
                )
                also = below[torch.rand(below.shape, device=device) >= share]
                hits = torch.cat([hits, also])[: self.slots]
            others = torch.ones(state.host_slots, dtype=torch.bool, device=device)
            others[wanted] = False
            if near is not None:
                others[self.below[layer].flatten().long()] = False
            others = others.nonzero().squeeze(1)
            picked = torch.randperm(others.numel(), device=device)
            older = others[picked[: self.slots - hits.numel()]]
            owners = torch.cat([hits, older])
            owners = owners[torch.randperm(self.slots, device=device)]
            age = torch.randint(2, CLOCK, (self.slots,), device=device)
            selected = torch.isin(owners, hits)
            priority = torch.where(selected, CLOCK * 8 + 4, (CLOCK - age) * 8)
            state.priority[layer].copy_(priority)
            state.device_to_host[layer].copy_(owners)
            state.host_to_device[layer].fill_(-1)
            places = torch.arange(self.slots, device=device, dtype=torch.int32)
            state.host_to_device[layer][owners] = places
            state.device_free[layer].fill_(0)
        # A replay takes names off the lists unseen: make them anew.
        ready = self.manager._ready
        assert ready is not None
        ready._in_order = [False] * len(self.wanted)
        self.manager.begin_step()

    def run(self, budget: float) -> None:
        """All layers once; budget 0 is without prefetch."""
        for layer in range(len(self.wanted)):
            if budget <= 0:
                if budget < 0:
                    with self.fork():
                        self.touch(layer)
                scores = self.case.run(cuda.index_scores, layer)
                self.kernels.topk(scores, self.case.lens, K)
                if budget < 0:
                    torch.cuda.current_stream().wait_stream(self.side)
            else:
                scores, found = self._prefetch(layer, budget)
                topk(scores, self.case.lens, K, found)
                torch.cuda.current_stream().wait_stream(self.side)
            self.manager.make_resident(layer, self.wanted[layer], self.scores[layer])

    def touch(self, layer):
        rows = self.host.rows[layer]
        if not hasattr(self, "pages"):
            n = rows.nbytes >> 21
            ints = {"dtype": torch.int32, "device": "cuda"}
            self.pages = (torch.arange(n, device="cuda") * 2**21 // rows.shape[1]).to(torch.int32)
            self.n = torch.tensor([n], **ints)
            self.dummy = torch.empty(n, rows.shape[1], dtype=torch.uint8, device="cuda")
            self.places = torch.arange(n, **ints)
        from echokv.kernels.cuda import recall
        recall.recall(self.pages, self.n, self.places, rows, self.dummy)

    @contextmanager
    def fork(self):
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            yield

    def _prefetch(self, layer: int, budget: float) -> tuple[Tensor, Tensor]:
        case, rows_per_unit = self.case, round(budget * BYTES_PER_TOKEN * UNIT / self.row_bytes)
        least = LEAST
        most = least + self.length * rows_per_unit // UNIT
        found, kth = self.found.setdefault(
            (layer, most),
            (
                Candidates.room(len(case.rows), most, case.lens.device),
                torch.empty(len(case.rows), device=case.lens.device),
            ),
        )
        scores = cuda.index_scores_prefetch(
            case.query, case.weights, case.pages[layer], FMT, case.tables, case.rows, case.lens,
            case.longest, self.request_slots, self.thresholds[layer], self.enabled,
            self.fused_layer(layer), self.lists, found, kth, self.fork,
            rows_per_unit=rows_per_unit, least=least,
        )  # fmt: skip
        return scores, kth

    def fused_layer(self, layer: int) -> FusedLayer:
        """One layer's tensors, with totals of its own for what is prefetched."""
        state, ready = self.manager.state.layer(layer), self.manager._ready
        assert ready is not None
        return FusedLayer(
            floor=self.manager.state.floor, device_free=state.device_free,
            priority=state.priority, device_to_host=state.device_to_host,
            host_to_device=state.host_to_device, ready=state.slot_buffer,
            cursor=ready._cursors[layer : layer + 1], barrier=ready._barrier,
            totals=self.totals[layer], host_rows=self.host.rows[layer],
            device_rows=self.manager.rows(layer), num_ready=self.slots,
        )  # fmt: skip

    def check(self) -> dict[str, Any]:
        """A prefetched step at hit rate 0.9 leaves the state right; what it fetched, in layer 0."""
        self.prepare(0.9)
        self.totals.zero_()
        before = self.manager.counters()[0].recalled
        self.run(1.0)
        self.manager.check()
        found = self.manager.state.host_to_device[0][self.wanted[0].flatten().long()]
        return {
            "ok": bool((found >= 0).all()),
            "misses": round(0.1 * self.wanted[0].numel()),
            "prefetched": int(self.totals[0, 1]),
            "recalled": self.manager.counters()[0].recalled - before,
        }


def time_variants(
    segment: Segment, hit_rates: tuple[float, ...], flush: Tensor, rounds: int
) -> dict[str, float]:
    """Median microseconds a layer, by variant and hit rate."""
    runs: dict[str, Callable[[], None]] = {
        "off": lambda: segment.run(0),
        "on": lambda: segment.run(1.0),
        "on, late": lambda: segment.run(1.0, late=True),
        "on, late x2": lambda: segment.run(2.0, late=True),
    }
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, run in runs.items():
        segment.prepare(0.9)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            run()
    plan = [(f"{name} {rate}", name, rate) for rate in hit_rates for name in runs]
    plan += [("off, all resident", "off", 1.0), ("on, all resident", "on", 1.0)]
    samples: dict[str, list[float]] = {label: [] for label, _, _ in plan}
    for _ in range(rounds):
        for label, name, rate in plan:
            segment.prepare(rate)
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            samples[label].append(begin.elapsed_time(end) * 1e3 / len(segment.wanted))
    return {label: statistics.median(taken) for label, taken in samples.items()}


def main() -> None:
    """Parse flags; check and time every shape; write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", help="of the code that runs; default: the git checkout's")
    parser.add_argument("--layers", type=int, default=4, help="in a graph")
    parser.add_argument("--rounds", type=int, default=15, help="replays of each graph")
    parser.add_argument("--few", action="store_true", help="only some of the shapes")
    args = parser.parse_args()
    torch.manual_seed(1)
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    report: dict[str, Any] = {"environment": environment(args.commit), "segments": []}
    shapes = [(rows, length, 656) for rows, length in reversed(SHAPES)] + [(13, 98_304, 1152)]
    if args.few:
        shapes = [shapes[0], *shapes[2:4], shapes[6], shapes[8], shapes[9]]
    for rows, length, row_bytes in shapes:
        segment = Segment(rows, length, row_bytes, args.layers)
        verdict = segment.check()
        print(f"{rows} x {length}, {row_bytes} B: {verdict}", flush=True)
        if not verdict["ok"]:
            sys.exit("wrong state: nothing is timed")
        times = time_variants(segment, HIT_RATES, flush, args.rounds)
        print("  " + ", ".join(f"{name}: {taken:.1f}" for name, taken in times.items()), flush=True)
        report["segments"].append(
            {"rows": rows, "length": length, "row_bytes": row_bytes,
             "check": verdict, "median_us": times}
        )  # fmt: skip
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        segment.host.close()
        del segment


if __name__ == "__main__":
    main()
