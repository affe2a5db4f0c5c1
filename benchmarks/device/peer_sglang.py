"""SGLang HiSparse's swap-in kernel beside `make_resident`, alone and after scores and top-k.

    pip download sglang==0.5.23 --no-deps --only-binary=:all: --python-version 3.12
    unzip sglang-*.whl 'sglang/kernels/jit/*' -d device-inputs/sglang
    python benchmarks/device/peer_sglang.py --sources device-inputs/sglang --build-only
    python benchmarks/device/peer_sglang.py --sources device-inputs/sglang --out peer_sglang.json

What is compiled is in sglang_kernels.py; the result says which sources. The kernel runs as SGLang's
coordinator calls it: one block of 960 threads a request, 2048 picks against a hot buffer of 4096
rows of 656 B. Ours has as many device slots in all, shared by the requests. The same bytes are in
host memory twice: managed for ours, and for theirs pinned, as SGLang has it, or managed too with
`--their-memory managed`, which it doesn't do: its launcher asks for the device's address of the
host rows, and managed memory has none of its own, so it gets them as a tensor of the GPU. Rows are
compared with host memory before anything is timed.

    swap-in   each cache holds what the steps before left there; every step replaces a share of each
              request's picks by rows that left both caches long ago
    top-k     alone, scores not in L2
    segment   index scores, top-k and residency, ours with prefetch too: peer_segment.py

Times are a layer's share of a CUDA graph over four layers, medians of replays in turn; before each,
L2 is overwritten and 4 GiB of other host memory of each kind are read, as other layers do. Our
`begin_step`, one for all layers of a decode step, comes before the clock starts; "begin_step too"
has it inside, a quarter of it a layer where a 61st would do. Needs tvm_ffi, and deep_gemm but for
the swap-in.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import prefetch as ahead  # benchmarks/device/prefetch.py
import sglang_kernels  # benchmarks/device/sglang_kernels.py
import torch
from peer_case import Case  # benchmarks/device/peer_case.py
from peer_segment import (  # benchmarks/device/peer_segment.py
    DeepGemmLogits,
    Peer,
    is_topk,
    measure,
)
from sglang_kernels import HOT, ROW, HiSparse, K
from torch import Tensor
from turns import Others, in_turns  # benchmarks/device/turns.py

from echokv.bench.report import environment
from echokv.cache.manager import CacheManager
from echokv.memory.pools import DevicePool, HostPool
from echokv.memory.slots import HostSlots

LAYERS = 4
SHAPES = ((1, 98_304), (13, 98_304), (64, 32_768))  # requests, tokens of context each
MISSING = (0.0, 0.01, 0.03, 0.10, 0.50)
SEGMENT_MISSING = (0.0, 0.03, 0.10)
CYCLE = 16_384
"""Rows that a request's picks go through: one that comes back left both caches long before."""


class Picks:
    """Each request's selection, step after step, in fixed tensors that graphs read."""

    def __init__(self, batch: int, context: int, device: torch.device) -> None:
        noise = torch.rand(batch, context, device=device)
        self._order = noise.argsort(dim=1)[:, :CYCLE].to(torch.int32)
        self._first = torch.arange(batch, dtype=torch.int32, device=device)[:, None] * context
        self._start = 0
        self.positions = torch.empty((batch, K), dtype=torch.int32, device=device)
        self.host_slots = HostSlots(torch.empty_like(self.positions))

    def advance(self, new: int) -> None:
        """Replace so many picks of every request by others."""
        self._start += new
        where = (self._start + torch.arange(K, device=self._order.device)) % CYCLE
        self.positions.copy_(self._order[:, where].sort(dim=1).values)
        self.host_slots.copy_(self.positions + self._first)


class SwapIn:
    """Both caches of one shape, over the host rows of a world, and what is timed on them."""

    def __init__(
        self, swap_in: Callable[..., None], world: ahead.World, their_rows: Tensor, batch: int,
        context: int,
    ) -> None:  # fmt: skip
        device = world.device
        self.batch, self.context, self.host = batch, context, world.host
        self.picks = Picks(batch, context, device)
        pool = DevicePool(LAYERS, batch * HOT, ROW, device)
        self.ours = CacheManager(world.kernels, self.host, pool)
        host_slots = torch.arange(batch * context, device=device).view(batch, context)
        self.theirs = HiSparse(swap_in, their_rows, host_slots)
        self.scores = torch.randn(batch, K, device=device)

    def prepare(self, new: int) -> None:
        """The next step's picks, and our victims for it."""
        self.picks.advance(new)
        self.ours.begin_step(most_rows=self.batch * K)

    def run_step(self) -> None:
        """All layers, ours, and what sees to it that enough rows may leave."""
        self.ours.begin_step(most_rows=self.batch * K)
        self.run_ours()

    def run_ours(self) -> None:
        """All layers, ours."""
        for layer in range(LAYERS):
            self.ours.make_resident(layer, self.picks.host_slots, self.scores)

    def run_theirs(self) -> None:
        """All layers, HiSparse's."""
        for layer in range(LAYERS):
            self.theirs.swap_in(layer, self.picks.positions)

    def check(self, new: int) -> str | None:
        """One step on both: rows as in host memory, and so many brought in; else what is wrong."""
        before, tokens = self.ours.counters(), self.theirs.tokens.clone()
        self.prepare(new)
        for layer in range(LAYERS):
            want = self.host.rows[layer][self.picks.host_slots.flatten().cpu().long()].cuda()
            slots = self.ours.make_resident(layer, self.picks.host_slots, self.scores)
            if not torch.equal(self.ours.rows(layer)[slots.flatten().long()], want):
                return f"layer {layer}: our rows"
            found = self.theirs.swap_in(layer, self.picks.positions)
            if not torch.equal(self.theirs.rows[layer][found.flatten().long()], want):
                return f"layer {layer}: HiSparse's rows"
        recalled = self.ours.counters()[0].recalled - before[0].recalled
        swapped = int((self.theirs.tokens[0] != tokens[0]).sum())
        if {recalled, swapped} != {self.batch * new}:
            return f"{recalled} and {swapped} rows were brought in, not {self.batch * new}"
        return None

    def check_all(self) -> bool:
        """Steps of all kinds, the caches filled by the first; what is wrong is printed."""
        self.check(K // 2)
        wrong = [(new, self.check(new)) for new in (K // 2, K // 2, K // 10, 0, 61)]
        for new, what in wrong:
            if what:
                print(f"WRONG, {self.batch} x {self.context}, {new} new: {what}", flush=True)
        return not any(what for _, what in wrong)

    def measure(self, others: Others, repeats: int) -> list[dict[str, Any]]:
        """Microseconds a layer, by share of missing rows."""
        rows = []
        plain = {"ours": self.run_ours, "HiSparse": self.run_theirs}
        whole = {"begin_step too": self.run_step, "HiSparse": self.run_theirs}
        for missing in MISSING:
            new = round(missing * K)
            us = in_turns(plain, lambda new=new: self.prepare(new), others, repeats, LAYERS)
            step = in_turns(whole, lambda new=new: self.picks.advance(new), others, repeats, LAYERS)
            us["begin_step too"] = step["begin_step too"]
            ratio = us["HiSparse"]["median"] / us["ours"]["median"]
            line = ", ".join(f"{name} {taken['median']:.1f}" for name, taken in us.items())
            print(f"swap-in, {self.batch} x {self.context}, {missing:.0%} missing: {line} us,"
                  f" {ratio:.2f}x", flush=True)  # fmt: skip
            rows.append(
                {"part": "swap-in", "batch": self.batch, "context": self.context,
                 "missing": missing, "rows": self.batch * new, "us": us, "ratio": ratio}
            )  # fmt: skip
        return rows


def measure_topk(
    case: Case, logits: DeepGemmLogits, kernels: dict[str, sglang_kernels.TopK], others: Others,
    repeats: int,
) -> dict[str, Any]:  # fmt: skip
    """Top-k alone of both sides, once their sets are those of torch.topk."""
    logits.take(case)
    made = [logits(layer).clone() for layer in range(LAYERS)]
    out = torch.empty((case.batch_size, K), dtype=torch.int32, device=case.world.device)
    for name, topk in kernels.items():
        out.fill_(-1)
        topk(made[0], out)
        if not is_topk(made[0][:, : case.context], out.long()):
            print(f"{name}: another set than torch.topk's", flush=True)
    lens, ours = case.batch.context_lens, case.world.kernels.topk

    def on(topk: Callable[[Tensor, Tensor], None]) -> Callable[[], object]:
        return lambda: [topk(scores, out) for scores in made]

    runs: dict[str, Callable[[], object]] = {"ours": lambda: [ours(x, lens, K) for x in made]}
    runs |= {name: on(topk) for name, topk in kernels.items()}
    us = in_turns(runs, lambda: None, others, repeats, LAYERS)
    line = ", ".join(f"{name} {taken['median']:.1f}" for name, taken in us.items())
    print(f"top-k, {case.batch_size} x {case.context}: {line} us", flush=True)
    return {"part": "top-k", "batch": case.batch_size, "context": case.context, "us": us}


def measure_segment(
    modules: dict[str, Any], case: Case, their_rows: Tensor, others: Others, repeats: int,
    rounds: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Top-k alone, then the segment with the faster of SGLang's."""
    world = case.world
    kernels = sglang_kernels.topk_kernels(modules, case.batch.context_lens)
    generator = torch.Generator(device=world.device).manual_seed(4)
    case.draw(0.1, generator)
    logits = DeepGemmLogits(case)
    alone = measure_topk(case, logits, kernels, others, repeats)
    fastest = min(kernels, key=lambda name: alone["us"][name]["median"])
    cache = HiSparse(modules["swap"].swap_in, their_rows, case.host_slots)
    peer = Peer(case, logits, kernels[fastest], cache)
    found = measure(case, peer, others, SEGMENT_MISSING, rounds)
    return [alone, *(row | {"topk": fastest} for row in found)]


def on_device(rows: Tensor) -> Tensor:
    """Managed rows [L, N, row_bytes] uint8 as a tensor of the GPU, at the same address."""
    address = {"data": (rows.data_ptr(), False), "shape": tuple(rows.shape), "typestr": "|u1"}
    view = type("View", (), {"__cuda_array_interface__": address | {"version": 3}})()
    return torch.as_tensor(view, device="cuda")


def main() -> int:
    """Check and time every shape, writing JSON after each; 1 when a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sources", type=Path, required=True, help="folder that holds sglang/")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--commit", help="of the code that runs; default: the git checkout's")
    parser.add_argument("--repeats", type=int, default=30, help="replays of each graph")
    parser.add_argument("--rounds", type=int, default=16, help="the same for segments")
    parser.add_argument(
        "--build-only", action="store_true", help="compile SGLang's kernels, no GPU"
    )
    parser.add_argument(
        "--their-memory", choices=("pinned", "managed"), default="pinned", help="SGLang's host rows"
    )
    parser.add_argument("--no-segment", action="store_true", help="without scores and top-k")
    options = parser.parse_args()
    sglang_kernels.build(options.sources)
    if options.build_only:
        return 0
    modules = sglang_kernels.load(options.sources)
    torch.manual_seed(11)
    report: dict[str, Any] = {
        "environment": environment(options.commit),
        "sglang": {
            "version": sglang_kernels.VERSION,
            "sources_sha256": (options.sources / "sha256").read_text(),
        },
        "layers": LAYERS,
        "their_memory": options.their_memory,
        "timings": [],
    }
    start, failed, others = time.perf_counter(), False, Others(ROW)
    for batch, context in SHAPES:
        sizes = replace(
            ahead.REAL, layers=LAYERS, device_slots=batch * HOT, batches=(batch,),
            contexts=(context,),
        )  # fmt: skip
        world = ahead.World(sizes, "cuda", "fp8_ds_mla", torch.device("cuda"))
        gib = LAYERS * batch * context * ROW / 2**30
        layers, slots, row_bytes = world.host.rows.shape
        theirs = HostPool(layers, slots, row_bytes, world.device, options.their_memory)
        theirs.rows.copy_(world.host.rows)
        rows = theirs.rows if options.their_memory == "pinned" else on_device(theirs.rows)
        shape = SwapIn(modules["swap"].swap_in, world, rows, batch, context)
        failed |= not shape.check_all()
        print(f"{batch} x {context}, host rows of {gib:.2f} GiB, swap-in checked"
              f" after {time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip
        if not failed:
            timings = shape.measure(others, options.repeats)
            if not options.no_segment:
                case = Case(world, batch, context)
                timings += measure_segment(
                    modules, case, rows, others, options.repeats, options.rounds
                )
            report["timings"] += [row | {"host_gib": gib} for row in timings]
            options.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{time.perf_counter() - start:.0f} s", flush=True)
        theirs.close()
        world.host.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
