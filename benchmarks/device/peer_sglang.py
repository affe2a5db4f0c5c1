"""SGLang HiSparse's swap-in kernel beside `make_resident`: same picks, same HBM, in one run.

    pip download sglang==0.5.23 --no-deps --only-binary=:all: --python-version 3.12
    unzip sglang-*.whl 'sglang/kernels/jit/*' -d device-inputs/sglang
    python benchmarks/device/peer_sglang.py --sources device-inputs/sglang --build-only
    python benchmarks/device/peer_sglang.py --sources device-inputs/sglang --out peer_sglang.json

What is compiled, by nvcc and without a GPU, is SGLang 0.5.23 as published on PyPI; the result says
which sources, and none of them is in this repository. Its kernel runs as its coordinator calls it:
one block of 960 threads a request, 2048 picks against a hot buffer of 4096 rows of 656 B. Ours has
as many device slots in all, shared by the requests. Both read the same host rows, and each holds
what the steps before left there. Every step replaces a share of each request's picks by rows that
left both caches long ago. Rows are compared with host memory before anything is timed.

`segment` puts index scores and top-k before it: DeepGEMM's logits from a query that is quantised
already and the faster of SGLang's two top-k kernels on that side, `index_scores` from the bf16
query, `topk_rows` on ours. Selections are replayed: what the top-k found is not used.

Times are a layer's share of a CUDA graph over four layers, medians of replays in turn; before each,
L2 is overwritten and 4 GiB of other host memory are touched, as other layers do. Our `begin_step`,
one for all layers of a decode step, comes before the clock starts; "begin_step too" has it inside,
a quarter of it a layer where a 61st would do. Needs tvm_ffi, for `segment` deep_gemm too.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import tvm_ffi
from index_scores import DeepGemm, make_case  # benchmarks/device/index_scores.py
from torch import Tensor
from tvm_ffi import libinfo

import cache as common  # benchmarks/device/cache.py
from echokv.bench.report import environment
from echokv.cache.manager import CacheManager
from echokv.kernels.cuda import recall
from echokv.kernels.registry import load_kernels
from echokv.memory.pools import DevicePool, HostPool
from echokv.memory.slots import HostSlots

LAYERS, K, HOT, ROW = 4, 2048, 4096, 656
SHAPES = ((1, 98_304), (13, 98_304), (64, 32_768))  # requests, tokens of context each
MISSING = (0.0, 0.01, 0.03, 0.10, 0.50)
SEGMENT_MISSING = (0.0, 0.03, 0.10)
CYCLE = 16_384
"""Rows that a request's picks go through: one that comes back left both caches long before."""

MODULES = {
    "swap": """
#include "kvcacheio/hisparse.cuh"
#include "elementwise/fast_topk.cuh"
#include <tvm/ffi/function.h>
using namespace sglang;
TVM_FFI_DLL_EXPORT_TYPED_FUNC(swap_in, (load_cache_to_device_buffer<
    960, 2048, 4096, true, false, 1, false, false, false>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fast_topk, (FastTopKKernel<2048, true>::run));
""",
    "topk": """
#include "deepseek_v4/topk_v2.cuh"
#include <tvm/ffi/function.h>
using namespace sglang;
TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk_v2, (TopKKernel<true>::transform_paged));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk_plan, (TopKKernel<true>::plan));
""",
}
"""What of SGLang's headers is instantiated, and under which name."""

FLAGS = (
    "-shared -std=c++20 -O3 --expt-relaxed-constexpr -Xcompiler -fPIC -DSGL_CUDA_ARCH=900"
    " -gencode=arch=compute_90a,code=sm_90a"
    # Its loader probes how many clusters of 16 blocks fit; on an H200 some do, few are used here.
    " -DSGL_TOPK_V2_MAX_C16_OCC1=7"
).split()


def build(sources: Path) -> None:
    """Compile what isn't compiled yet, beside the sources, and note which sources they were."""
    library, jit = Path(libinfo.find_libtvm_ffi()), sources / "sglang/kernels/jit"
    includes = (
        jit / "include", jit / "csrc", libinfo.find_include_path(),
        libinfo.find_dlpack_include_path(),
    )  # fmt: skip
    for name, text in MODULES.items():
        if (sources / f"{name}.so").exists():
            continue
        (sources / f"{name}.cu").write_text(text)
        subprocess.run(
            ["nvcc", *FLAGS, *(f"-I{path}" for path in includes), f"-L{library.parent}",
             "-ltvm_ffi", "-o", sources / f"{name}.so", sources / f"{name}.cu"],
            check=True,
        )  # fmt: skip
    if (sources / "sglang").exists():
        (sources / "sha256").write_text(digest(sources))


def digest(sources: Path) -> str:
    """Of all headers that there are to include."""
    files = sorted((sources / "sglang").rglob("*.cuh"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


class Picks:
    """Each request's selection, step after step, in fixed tensors that graphs read."""

    def __init__(self, batch: int, context: int, device: torch.device) -> None:
        noise = torch.rand(batch, context - 1, device=device)  # not the newest token
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


class HiSparse:
    """SGLang's caches of some layers, by its kernel's own tensors."""

    def __init__(self, module: Any, host: HostPool, batch: int, context: int) -> None:
        device = torch.device("cuda")
        ints = {"dtype": torch.int32, "device": device}
        self._module, self._host, padded = module, host, HOT + 1
        self.tokens = torch.full((LAYERS, batch, padded), -1, **ints)
        self._buffer_locs = torch.arange(batch * padded, **ints).view(batch, padded)
        order = torch.arange(HOT, dtype=torch.int16, device=device)
        self._order = order.repeat(LAYERS, batch, 1)
        self._host_locs = torch.arange(batch * context, device=device).view(batch, context)
        self._requests = torch.arange(batch, device=device)
        self._lens = torch.full((batch,), context, dtype=torch.int64, device=device)
        self._real = torch.tensor([batch], **ints)
        self._none = torch.empty(0, device=device)
        self.rows = torch.zeros((LAYERS, batch * padded, ROW), dtype=torch.uint8, device=device)
        self.found = torch.empty((batch, K), **ints)

    def swap_in(self, layer: int, positions: Tensor) -> Tensor:
        """Device rows of one layer's picks."""
        with tvm_ffi.use_torch_stream():
            self._module.swap_in(
                positions, self.tokens[layer], self._host_locs, self._buffer_locs,
                self._host.rows[layer], self._none, self.rows[layer], self._none, self.found,
                self._requests, self._lens, self._order[layer], self._real, 1, ROW,
                self._none, self._none, self._none,
            )  # fmt: skip
        return self.found


class Shape:
    """Both caches of one shape, and what is timed on them."""

    def __init__(self, modules: dict[str, Any], batch: int, context: int) -> None:
        device = torch.device("cuda")
        self.batch, self.context, self._modules = batch, context, modules
        self.host = HostPool(LAYERS, batch * context, ROW, device)
        common.fill_random(self.host.rows)
        self.picks = Picks(batch, context, device)
        self.kernels = load_kernels("cuda", device)
        pool = DevicePool(LAYERS, batch * HOT, ROW, device)
        self.ours = CacheManager(self.kernels, self.host, pool)
        self.theirs = HiSparse(modules["swap"], self.host, batch, context)
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

    def segment(self) -> tuple[dict[str, Callable[[], object]], dict[str, Callable[[], object]]]:
        """Index scores, top-k and residency of all layers, of each side; then top-k alone."""
        batch, device = self.batch, self.scores.device
        case = make_case([self.context] * batch, 64, LAYERS, device)
        logits, swap, second = DeepGemm(case), self._modules["swap"], self._modules["topk"]
        starts = torch.zeros(batch, dtype=torch.int32, device=device)
        plan = torch.zeros((batch + 1, 2), dtype=torch.int32, device=device)
        second.topk_plan(case.lens, plan, -1)
        out = torch.empty((batch, K), dtype=torch.int32, device=device)

        def fast_topk(scores: Tensor) -> None:
            with tvm_ffi.use_torch_stream():
                swap.fast_topk(scores, starts, out, case.lens)

        def topk_v2(scores: Tensor) -> None:
            with tvm_ffi.use_torch_stream():
                second.topk_v2(scores, case.lens, None, out, 64, plan, None)

        def theirs(topk: Callable[[Tensor], None]) -> None:
            for layer in range(LAYERS):
                topk(logits(layer))
                self.theirs.swap_in(layer, self.picks.positions)

        def ours() -> None:
            for layer in range(LAYERS):
                scores = case.run(self.kernels.index_scores, layer)
                self.kernels.topk_rows(scores, case.lens, K, case.rows, case.tables)
                self.ours.make_resident(layer, self.picks.host_slots, self.scores)

        for topk in (fast_topk, topk_v2):
            scores = logits(0)[:, : self.context]
            out.fill_(-1)
            topk(logits(0))
            want = scores.topk(K, dim=1).indices.sort(dim=1).values
            if not torch.equal(out.sort(dim=1).values.long(), want):
                print(f"{topk.__name__}: another set than torch.topk's", flush=True)
        segments = {
            "ours": ours,
            "HiSparse, fast_topk": lambda: theirs(fast_topk),
            "HiSparse, topk_v2": lambda: theirs(topk_v2),
        }
        made = [logits(layer).clone() for layer in range(LAYERS)]
        alone = {
            "ours": lambda: [self.kernels.topk(scores, case.lens, K) for scores in made],
            "fast_topk": lambda: [fast_topk(scores) for scores in made],
            "topk_v2": lambda: [topk_v2(scores) for scores in made],
        }
        return segments, alone


class Others:
    """What the other layers of a model leave behind: an L2 cache and translations of theirs."""

    def __init__(self) -> None:
        self._device = torch.device("cuda")
        self._bytes = torch.empty(2**28, dtype=torch.uint8, device=self._device)
        self._host = HostPool(1, 2**32 // ROW // 64 * 64, ROW, self._device)
        rows = torch.arange(0, self._host.rows.shape[1], 2**21 // ROW, device=self._device)
        self._sources, self._targets = (
            rows.int(),
            torch.arange(len(rows), device=self._device).int(),
        )
        self._count = torch.tensor([len(rows)], dtype=torch.int32, device=self._device)
        self._landed = torch.empty((len(rows), ROW), dtype=torch.uint8, device=self._device)

    def __call__(self) -> None:
        """Overwrite L2, and read from every page of 4 GiB of host memory."""
        self._bytes.zero_()
        recall.recall(self._sources, self._count, self._targets, self._host.rows[0], self._landed)


def in_turns(
    runs: dict[str, Callable[[], object]],
    prepare: Callable[[], None],
    others: Others,
    repeats: int,
) -> dict[str, dict[str, float]]:
    """A layer's share of each run's graph, in microseconds; every round has one `prepare`.

    Runs read the same host rows: who goes first changes from round to round.
    """
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            prepare()
            for run in runs.values():
                run()
    torch.cuda.current_stream().wait_stream(stream)
    for name, run in runs.items():
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            run()
    for round_ in range(repeats + 2):
        prepare()
        order = list(graphs.items())
        for name, graph in order if round_ % 2 else reversed(order):
            others()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if round_ >= 2:
                samples[name].append(begin.elapsed_time(end) * 1e3 / LAYERS)
    return {
        name: common.spread(taken) | {"mean": statistics.fmean(taken)}
        for name, taken in samples.items()
    }


def measure(shape: Shape, others: Others, repeats: int, *, segment: bool) -> list[dict[str, Any]]:
    """Times of one shape, by share of missing rows."""
    rows = []
    plain: dict[str, Callable[[], object]] = {
        "ours": shape.run_ours, "HiSparse": shape.run_theirs,
    }  # fmt: skip
    parts = [("swap-in", plain, MISSING)]
    if segment:
        segments, alone = shape.segment()
        parts.append(("segment", segments, SEGMENT_MISSING))
        taken = in_turns(alone, lambda: None, others, repeats)
        line = ", ".join(f"{name} {us['median']:.1f}" for name, us in taken.items())
        print(f"top-k, {shape.batch} x {shape.context}: {line} us", flush=True)
        rows.append({"part": "top-k", "batch": shape.batch, "context": shape.context, "us": taken})
    for part, runs, shares in parts:
        for missing in shares:
            new = round(missing * K)
            if part == "segment":  # two of the runs share one cache: each alone with ours
                taken = {}
                for name in list(runs)[1:]:
                    pair = in_turns(
                        {"ours": runs["ours"], name: runs[name]},
                        lambda new=new: shape.prepare(new), others, repeats,
                    )  # fmt: skip
                    taken |= pair
                peer = min(us["median"] for name, us in taken.items() if name != "ours")
            else:
                taken = in_turns(runs, lambda new=new: shape.prepare(new), others, repeats)
                peer = taken["HiSparse"]["median"]
                whole = {"begin_step too": shape.run_step, "HiSparse": shape.run_theirs}
                taken |= {
                    "begin_step too": in_turns(
                        whole, lambda new=new: shape.picks.advance(new), others, repeats
                    )["begin_step too"]
                }
            ratio = peer / taken["ours"]["median"]
            line = ", ".join(f"{name} {us['median']:.1f}" for name, us in taken.items())
            print(f"{part}, {shape.batch} x {shape.context}, {missing:.0%} missing: {line} us,"
                  f" {ratio:.2f}x", flush=True)  # fmt: skip
            rows.append(
                {"part": part, "batch": shape.batch, "context": shape.context, "missing": missing,
                 "rows": shape.batch * new, "us": taken, "ratio": ratio}
            )  # fmt: skip
    return rows


def main() -> int:
    """Check and time every shape, writing JSON after each; 1 when a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sources", type=Path, required=True, help="folder that holds sglang/")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--commit", help="of the code that runs; default: the git checkout's")
    parser.add_argument("--repeats", type=int, default=30, help="replays of each graph")
    parser.add_argument(
        "--build-only", action="store_true", help="compile SGLang's kernels, no GPU"
    )
    parser.add_argument("--no-segment", action="store_true", help="without scores and top-k")
    options = parser.parse_args()
    build(options.sources)
    if options.build_only:
        return 0
    modules = {name: tvm_ffi.load_module(str(options.sources / f"{name}.so")) for name in MODULES}
    torch.manual_seed(11)
    report: dict[str, Any] = {
        "environment": environment(options.commit),
        "sglang": {"version": "0.5.23", "sources_sha256": (options.sources / "sha256").read_text()},
        "layers": LAYERS,
        "timings": [],
    }
    start, failed, others = time.perf_counter(), False, Others()
    for batch, context in SHAPES:
        shape = Shape(modules, batch, context)
        shape.check(K // 2)  # everything misses; the caches fill
        for new in (K // 2, K // 2, K // 10, 0, 61):
            wrong = shape.check(new)
            if wrong:
                print(f"WRONG, {batch} x {context}, {new} new: {wrong}", flush=True)
                failed = True
        gib = shape.host.rows.numel() / 2**30
        print(f"{batch} x {context}, host rows of {gib:.2f} GiB, checked"
              f" after {time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip
        if not failed:
            timings = measure(shape, others, options.repeats, segment=not options.no_segment)
            report["timings"] += [row | {"host_gib": gib} for row in timings]
            options.out.write_text(json.dumps(report, indent=1) + "\n")
        shape.host.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
