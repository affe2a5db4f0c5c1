"""A decode step of the engine with prefetch and without, selections and scores belonging together.

    python benchmarks/device/decode_prefetch.py --num-layers 16 --out decode_prefetch.json

Replayed selections (`echokv bench decode --hit-rate`) have nothing to do with the scores, so that
no prediction could name them. Here the real indexer selects, over planted keys: each host slot's
key is an angle, at 20 frequencies, the query an angle too that moves on from step to step, and the
score of a key falls with its distance from the query. So a selection is the k slots nearest to the
query's angle, a step replaces the share of them that --hit-rate says, and those that are about to
be selected are absent, like those that no step has come near. What the indexer, the top-k and
everything else cost is what they always cost; planting takes one small product a layer, in both.

Thresholds are overwritten before each step of the engine by scores that are as far off, in ranks,
as the demo model's were (recorded.py): one small gather a step, which only prefetch pays. Two
engines of one model take turns; off and on, in one run. Host memory read in turn: `gib`.
"""

import argparse
import dataclasses
import json
import math
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import recorded  # benchmarks/device/recorded.py
import torch
from torch import Tensor

from echokv.bench.decode_engine import DecodeEngine, LoadedModel, PoolSizes
from echokv.bench.decode_preset import preset_config
from echokv.bench.decode_replay import SelectionSource
from echokv.bench.report import environment
from echokv.cache.batch import ForwardBatch
from echokv.config import EngineConfig
from echokv.indexer.indexer import Indexer, Selection, TokenSelector
from echokv.memory.slots import BLOCK_TOKENS, blocks_for

FREQUENCIES = 20
CHUNK = 2**16


def planted(angles: Tensor, width: float) -> Tensor:
    """[n, 128] of angles [n]: products of two fall with their distance like a normal curve's.

    Args:
        angles: radians.
        width: the curve's standard deviation, radians.
    """
    order = torch.arange(1, FREQUENCIES + 1, device=angles.device)
    size = torch.exp(-((order * width) ** 2) / 4)
    turned = angles[:, None] * order
    waves = torch.cat([turned.cos() * size, turned.sin() * size], dim=1)
    return torch.nn.functional.pad(waves, (0, 128 - 2 * FREQUENCIES))


class PlantedSelector:
    """An indexer over planted keys, asked with planted queries.

    Args:
        exact: the engine's indexer.
        heads: of its queries.
        hit_rate: share of a selection that the step before selected too.
        context: tokens of a request, about.
    """

    def __init__(self, exact: Indexer, heads: int, hit_rate: float, context: int) -> None:
        self.topk = exact.topk
        self.exact = exact
        self._heads, self._layers = heads, exact.pages.shape[0]
        self._reach = math.pi * exact.topk / context  # of a selection, on either side
        self._step = 2 * self._reach * (1 - hit_rate)
        self.width = self._reach
        device = exact.pages.device
        self.steps = torch.zeros(1, device=device)
        self._starts = 2 * math.pi * torch.rand(self._layers, 1024, device=device)
        self._query = torch.zeros(0)

    def begin_pass(self, batch: ForwardBatch) -> None:
        """See `Indexer`; the step's queries of all layers."""
        self.exact.begin_pass(batch)
        angles = self._starts[:, : batch.num_tokens] + self.steps * self._step
        query = planted(angles.flatten(), self.width).view(self._layers, batch.num_tokens, 1, 128)
        self._query = query.expand(-1, -1, self._heads, -1).bfloat16().contiguous()
        self.steps.add_(1)

    def append(self, index_layer: int, keys: Tensor, batch: ForwardBatch) -> None:
        """See `Indexer`."""
        self.exact.append(index_layer, keys, batch)

    def select(
        self, index_layer: int, query: Tensor, weights: Tensor, batch: ForwardBatch
    ) -> Selection:
        """See `Indexer`; by the planted query, all heads weighing one."""
        ones = torch.ones_like(weights)
        return self.exact.select(index_layer, self._query[index_layer], ones, batch)


class PlantedEngine(DecodeEngine):
    """A decode engine whose index keys are planted."""

    hit_rate: float
    context: int

    def _keep_selector(self, indexer: Indexer, source: SelectionSource | None) -> TokenSelector:
        self._indexer = indexer
        heads = self.loaded.config.index_n_heads
        self.selector = PlantedSelector(indexer, heads, self.hit_rate, self.context)
        return self.selector

    def _fill(self, *, rows: bool = True) -> None:
        super()._fill(rows=rows)
        assert isinstance(self.selector, PlantedSelector)
        generator = torch.Generator(self.loaded.device).manual_seed(1)
        pages = self.selector.exact.pages
        for layer in pages:
            for start in range(0, layer.shape[0] * BLOCK_TOKENS, CHUNK):
                end = min(start + CHUNK, layer.shape[0] * BLOCK_TOKENS)
                places = torch.arange(start, end, dtype=torch.int32, device=layer.device)
                angles = torch.rand(end - start, generator=generator, device=layer.device)
                keys = planted(2 * math.pi * angles, self.selector.width)
                fmt = self.loaded.index_key_format
                self.loaded.kernels.write_index_keys(keys.bfloat16(), places, layer, fmt)


def ranked_scores(decode: PlantedEngine, batch: int, context: int) -> Tensor:
    """[len(CANDIDATES)] float32: what a row's score of each recorded rank is, the mean of some."""
    selector = decode.selector
    assert isinstance(selector, PlantedSelector)
    topk, device = selector.topk, decode.loaded.device
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    blocks = blocks_for(context)
    query = planted(torch.linspace(0, 6, batch, device=device), selector.width)[:, None]
    query = query.expand(-1, selector._heads, -1).bfloat16().contiguous()
    scores = decode.loaded.kernels.index_scores(
        query, torch.ones(batch, selector._heads, device=device), selector.exact.pages[0],
        decode.loaded.index_key_format,
        torch.arange(batch * blocks, **ints).view(batch, blocks),
        torch.arange(batch, **ints), torch.full((batch,), context, **ints), context,
    )  # fmt: skip
    best = scores.topk(min(4 * topk, context), dim=1).values.mean(dim=0)
    ranks = [min(max(round(ratio * topk), 1), len(best)) for ratio in recorded.CANDIDATES]
    return best[torch.tensor(ranks, device=device) - 1]


class Timed:
    """One engine, and the times of its steps.

    Args:
        decode: with requests queued.
        levels: thresholds to draw from; None: leave those that were learnt.
    """

    def __init__(self, decode: PlantedEngine, levels: Tensor | None) -> None:
        self.decode, self.levels = decode, levels
        self.step_ms: list[float] = []
        self.before = self.after = decode.engine.stats()

    def step(self) -> None:
        """One step, with the predictions that it is to have."""
        predictions = self.decode.engine._parts.predictions
        if predictions is not None and self.levels is not None:
            shape = predictions.thresholds.shape
            drawn = torch.randint(len(self.levels), shape, device=self.levels.device)
            predictions.thresholds.copy_(self.levels[drawn])
        self.decode.engine.step()

    def warm_up(self, steps: int) -> None:
        """Until the pool has what earlier steps leave."""
        for _ in range(steps):
            self.step()
        self.before = self.decode.engine.stats()

    def measure(self, steps: int) -> None:
        """Some steps, each by the wall clock, after one that isn't timed."""
        self.step()
        last = time.perf_counter()
        for _ in range(steps):
            self.step()
            now = time.perf_counter()
            self.step_ms.append((now - last) * 1e3)
            last = now
        self.after = self.decode.engine.stats()

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        pairs = list(zip(self.before.layers, self.after.layers, strict=True))

        def moved(name: str) -> float:
            return sum(getattr(new, name) - getattr(old, name) for old, new in pairs)

        ordered, selected = sorted(self.step_ms), moved("selected_rows")
        return {
            "median_ms": statistics.median(ordered),
            "p10_ms": ordered[len(ordered) // 10],
            "p90_ms": ordered[9 * len(ordered) // 10],
            "steps": len(ordered),
            "recalled_share": moved("recalled_rows") / selected,
            "useful_share": moved("prefetched_useful_rows") / selected,
            "wasted_share": moved("prefetched_wasted_rows") / selected,
        }


def main() -> None:
    """Parse flags; run both engines in turns; write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", help="of the code; default: the git checkout's")
    parser.add_argument("--num-layers", type=int, default=16, help="of the preset's 61")
    parser.add_argument("--num-experts", type=int, default=32, help="routed, a layer")
    parser.add_argument("--batch", type=int, default=13, help="requests")
    parser.add_argument("--context-len", type=int, default=32_768, help="of each")
    parser.add_argument("--hit-rate", type=float, default=0.95, help="of each step's selections")
    parser.add_argument("--steps", type=int, default=20, help="timed, of each engine and round")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine")
    parser.add_argument("--warmup-steps", type=int, default=30, help="before any is timed")
    parser.add_argument("--preset", default="deepseek-v3.2-dp8-slice", help="of bench decode")
    parser.add_argument("--backend", default="auto", help="of the kernels")
    args = parser.parse_args()
    torch.manual_seed(1)
    PlantedEngine.hit_rate, PlantedEngine.context = args.hit_rate, args.context_len
    raw = preset_config(
        args.preset, num_layers=args.num_layers, dense_layers=None, num_experts=args.num_experts,
        weights="bf16",
    )  # fmt: skip
    steps = args.warmup_steps + args.rounds * (args.steps + 1) + 8
    longest = args.context_len + steps + BLOCK_TOKENS
    with TemporaryDirectory(prefix="echokv-prefetch-") as folder:
        base = EngineConfig(model=folder, backend=args.backend, max_waiting_requests=2**20)
        loaded = LoadedModel.make(raw, Path(folder), base)
        topk = loaded.config.index_topk
        sizes = PoolSizes(
            offload=True, batch=args.batch, max_model_len=longest,
            host_tokens=args.batch * blocks_for(longest) * BLOCK_TOKENS,
            device_tokens=4 * topk * args.batch,
        )  # fmt: skip
        timed: dict[str, Timed] = {}
        for name, prefetch, drawn in (("off", "off", False), ("on", "on", True),
                                      ("on, learnt", "on", False)):  # fmt: skip
            config = dataclasses.replace(loaded.engine_config, prefetch=prefetch)
            engine = PlantedEngine(dataclasses.replace(loaded, engine_config=config), sizes, None)
            levels = ranked_scores(engine, args.batch, args.context_len) if drawn else None
            engine.add_requests([args.context_len] * args.batch, steps + 1, "planted")
            timed[name] = Timed(engine, levels)
            timed[name].warm_up(args.warmup_steps)
            print(f"{name} is warm", flush=True)
        for _ in range(args.rounds):
            for one in timed.values():
                one.measure(args.steps)
        row_bytes = loaded.row_format.row_bytes
        report = {
            "environment": environment(args.commit),
            "shape": {key: getattr(args, key) for key in
                      ("num_layers", "num_experts", "batch", "context_len", "hit_rate")},
            "gib": args.num_layers * args.batch * args.context_len * row_bytes / 2**30,
            "variants": {name: one.figures() for name, one in timed.items()},
        }  # fmt: skip
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["variants"], indent=1))


if __name__ == "__main__":
    main()
