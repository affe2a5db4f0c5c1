"""The segment with prefetch beside SGLang HiSparse's, in one run: scores, top-k, residency.

    python benchmarks/device/peer_ahead.py --sources device-inputs/sglang --out peer_ahead.json

`peer_sglang.py` replays selections that have nothing to do with the scores, so that no prediction
could name them. Here what is selected is what the scores say, new queries in every replay, and a
share of it is absent from both caches: ours as `prefetch.py` fills it, HiSparse's hot buffers with
the same selected rows and others of the request. Both have as many device rows and read the same
host rows. DeepGEMM's logits come from a query that is quantised already, and HiSparse swaps in what
the exact top-k found; the faster of SGLang's two top-k kernels counts.

    off      ours without prefetch
    ahead    ours with it, predictions perfect (the true k-th scores), or "on": as far off as
             recorded, limits learnt; rows ranked near k are absent as recorded

Who goes first changes from round to round; before each, L2 is overwritten and 4 GiB of other host
memory are touched. How `device-inputs/sglang` is made is in peer_sglang.py's head.
"""

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import prefetch as segment  # benchmarks/device/prefetch.py
import torch
import tvm_ffi
from index_scores import Case as Scored  # benchmarks/device/index_scores.py
from index_scores import DeepGemm
from peer_sglang import HOT, LAYERS, MODULES, HiSparse, K, Others, build
from torch import Tensor

import cache as common  # benchmarks/device/cache.py
from echokv.bench.report import environment
from echokv.indexer.threshold import Predictions

SHAPES = ((1, 98_304), (13, 98_304), (64, 32_768))
MISSING = (0.0, 0.03, 0.10)
KINDS = {"perfect": "perfect", "on": "recorded"}
SPARE = 64  # device slots of a request that nothing ranked holds


class Peer:
    """SGLang's side of a case: its caches over the same host rows, and its kernels."""

    def __init__(self, modules: dict[str, Any], case: segment.Case) -> None:
        world, batch, context = case.world, case.batch_size, case.context
        device = world.device
        self.case, self._modules = case, modules
        pages = [layer.view(-1, layer.shape[-1]) for layer in world.plain.pages]
        scored = [
            Scored(
                case.query[layer].bfloat16(), case.weights[layer], pages, case.batch.block_tables,
                case.batch.request_rows, case.batch.context_lens, context,
            )
            for layer in range(LAYERS)
        ]  # fmt: skip
        self._scored, self._logits = scored, [DeepGemm(one) for one in scored]
        self.cache = HiSparse(modules["swap"], world.host, batch, context)
        tokens = case.batch.block_tables.long()[:, :, None] * 64 + torch.arange(64, device=device)
        self.cache._host_locs = tokens.view(batch, -1)[:, :context].contiguous()
        ints = {"dtype": torch.int32, "device": device}
        self.positions = torch.zeros((LAYERS, batch, K), **ints)
        self._starts, self._out = torch.zeros(batch, **ints), torch.empty((batch, K), **ints)
        self._plan = torch.zeros((batch + 1, 2), **ints)
        modules["topk"].topk_plan(case.batch.context_lens, self._plan, -1)

    def take(self, missing: list[Tensor]) -> None:
        """The case's queries and selections; what is absent from our cache is from this one too."""
        world, batch, context = self.case.world, self.case.batch_size, self.case.context
        for layer, (scored, logits) in enumerate(zip(self._scored, self._logits, strict=True)):
            scored.query = self.case.query[layer].bfloat16()
            scored.weights = self.case.weights[layer]
            fresh = DeepGemm(scored)
            logits.query.copy_(fresh.query)
            logits.weights.copy_(fresh.weights)
            selected = self.case.selection(layer)
            self.positions[layer].copy_(selected.positions)
            absent = torch.isin(selected.host_slots, missing[layer])
            noise = torch.rand(batch, context, device=world.device)
            where = selected.positions.long()
            noise.scatter_(1, where, torch.where(absent, 2.0, -1.0))  # those that are there first
            hot = noise.argsort(dim=1)[:, :HOT].to(torch.int32)
            self.cache.tokens[layer, :, :HOT] = hot
            self.cache.tokens[layer, :, HOT:] = context - 1

    def run(self, name: str) -> None:
        """Scores, one of the top-k kernels, and the swap-in, of all layers."""
        lens = self.case.batch.context_lens
        for layer in range(LAYERS):
            scores = self._logits[layer](layer)
            with tvm_ffi.use_torch_stream():
                if name == "fast_topk":
                    self._modules["swap"].fast_topk(scores, self._starts, self._out, lens)
                else:
                    self._modules["topk"].topk_v2(
                        scores, lens, None, self._out, 64, self._plan, None
                    )
            self.cache.swap_in(layer, self.positions[layer])


def graph(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A capture, after one run outside."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        run()
    return made


class Case(segment.Case):
    """One whose pool has as many slots as HiSparse's hot buffers."""

    def _absent(self, hit: float, ranks: int, generator: torch.Generator, near: bool) -> Tensor:
        """The best ranked of what is resident, as far as slots go."""
        absent = super()._absent(hit, ranks, generator, near)
        return absent | ((~absent).cumsum(dim=1) > HOT - SPARE)

    def tensors(self) -> list[Tensor]:
        """All that a replay changes and the next one must find as it was."""
        manager, state = self.world.manager, self.world.manager.state
        assert manager._ready is not None
        return [
            state.device_free, state.priority, state.slot_buffer, state.device_to_host,
            state.host_to_device, state.clock, state.floor, manager._ready._cursors,
            self.world.predictions.thresholds,
        ]  # fmt: skip


def measure(case: Case, peer: Peer, others: Others, repeats: int) -> list[dict[str, Any]]:
    """Times of one shape, by share of missing rows."""
    world, found = case.world, []
    generator = torch.Generator(device=world.device).manual_seed(5)
    peer.take(case.prepare(0.9, "perfect", generator))
    off, _, _ = segment.graphs_of(case, world.plain)
    ahead, _, finish = segment.graphs_of(case, world.ahead)
    swaps = {
        f"HiSparse, {name}": graph(lambda name=name: peer.run(name)).replay
        for name in ("fast_topk", "topk_v2")
    }
    runs = {"off": off, "ahead": ahead} | swaps
    for share in MISSING:
        times: dict[str, list[float]] = {}
        learnt: Predictions | None = None
        for round_ in range(-segment.LEARNING, repeats):
            for kind, drawn in KINDS.items():
                peer.take(case.prepare(1 - share, drawn, generator))
                before = [one.clone() for one in case.tensors()]
                tokens = peer.cache.tokens.clone()
                order = list(runs.items())
                for name, replay in order if round_ % 2 else reversed(order):
                    for one, saved in zip(case.tensors(), before, strict=True):
                        one.copy_(saved)
                    peer.cache.tokens.copy_(tokens)
                    segment.recall_limits(world.predictions, learnt if kind == "on" else None)
                    others()
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    replay()
                    end.record()
                    end.synchronize()
                    if name == "ahead":
                        finish()
                        learnt = copy.deepcopy(world.predictions) if kind == "on" else learnt
                    if round_ >= 0:
                        us = begin.elapsed_time(end) * 1e3 / LAYERS
                        times.setdefault(f"{name}, {kind}", []).append(us)
        us = {name: common.spread(taken) for name, taken in times.items()}
        ratios = {}
        for kind in KINDS:
            theirs = min(us[f"{name}, {kind}"]["median"] for name in swaps)
            ratios |= {f"{x}, {kind}": theirs / us[f"{x}, {kind}"]["median"]
                       for x in ("off", "ahead")}  # fmt: skip
        found.append({"batch": case.batch_size, "context": case.context, "missing": share,
                      "us": us, "ratio": ratios})  # fmt: skip
        words = ", ".join(f"{name} {statistics.median(taken):.1f}" for name, taken in times.items())
        print(f"{case.batch_size} x {case.context}, {share:.0%} missing: {words}; "
              + ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items()),
              flush=True)  # fmt: skip
    return found


def main() -> int:
    """Time every shape, writing JSON after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sources", type=Path, required=True, help="folder that holds sglang/")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", help="of the code that runs; default: the git checkout's")
    parser.add_argument("--repeats", type=int, default=15, help="replays of each graph")
    options = parser.parse_args()
    build(options.sources)
    modules = {name: tvm_ffi.load_module(str(options.sources / f"{name}.so")) for name in MODULES}
    torch.manual_seed(11)
    report: dict[str, Any] = {
        "environment": environment(options.commit), "layers": LAYERS, "timings": [],
    }  # fmt: skip
    device, others = torch.device("cuda"), Others()
    for batch, context in SHAPES:
        sizes = replace(
            segment.REAL, layers=LAYERS, device_slots=batch * HOT, batches=(batch,),
            contexts=(context,),
        )  # fmt: skip
        world = segment.World(sizes, "cuda", "fp8_ds_mla", device)
        case = Case(world, batch, context)
        report["timings"] += measure(case, Peer(modules, case), others, options.repeats)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        torch.cuda.synchronize()
        world.host.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
