"""A decode step of the engine with prefetch and without, selections and scores belonging together.

    python benchmarks/device/decode_prefetch.py --out decode_prefetch.json           # on a GPU
    python benchmarks/device/decode_prefetch.py --small --out small.json             # anywhere

Replayed selections (`echokv bench decode --hit-rate`) have nothing to do with the scores, so that
no prediction could name them. Here the real indexer selects, by queries that wander through random
keys (`wandering.py`): a share of what each step selects isn't in the pool, most of it ranked near
k. What the indexer, the top-k and everything else cost is what they always cost; putting queries in
the place of the model's takes a few small kernels a step, and another writes predictions, on every
side.

    off         no prefetch
    on          predictions as far off, in ranks, as the demo model's were (recorded.py)
    on, learnt  predictions that the engine learnt: nearly exact, since k-th scores hardly change
    perfect     the true k-th scores, but for the few tokens that requests have decoded themselves
    resident    all rows in HBM, without offload: no prefetch can save more

Five engines of one model, over one host memory, take turns; all decode the same tokens, or nothing
counts. Limits are learnt wherever rows are prefetched. `--small` runs the same code at toy sizes;
its times mean nothing.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import recorded  # benchmarks/device/recorded.py
import timeline  # benchmarks/device/timeline.py
import torch
import turns  # benchmarks/device/turns.py
import wandering  # benchmarks/device/wandering.py
from torch import Tensor

from echokv.bench import decode_report, report
from echokv.bench.around_indexer import AroundIndexer
from echokv.bench.decode import StepTimer, spread
from echokv.bench.decode_engine import DecodeEngine, LoadedModel, PoolSizes, SharedRows
from echokv.bench.decode_preset import preset_config
from echokv.bench.decode_replay import SelectionSource
from echokv.cache.batch import ForwardBatch
from echokv.config import EngineConfig
from echokv.errors import EchoKVError
from echokv.indexer.indexer import Indexer, Selection, TokenSelector
from echokv.memory.slots import BLOCK_TOKENS, blocks_for

SIDES = {"off": "", "on": "recorded", "on, learnt": "", "perfect": "true", "resident": ""}
"""Each with the predictions that it is given; "": its own, if it prefetches."""

PROFILED_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What is measured: real sizes, or toy ones for a machine without a GPU."""

    preset: str
    weights: str
    layers: int
    dense_layers: int
    shapes: tuple[tuple[int, int], ...]  # requests, context
    steps: int
    warmup_steps: int


REAL = Scale(
    preset="deepseek-v3.2-dp8-slice",
    weights="fp8",
    layers=10,  # five engines of 64 requests must fit
    dense_layers=1,
    shapes=((13, 98_304), (24, 90_112), (48, 90_112), (13, 32_768), (64, 90_112)),
    steps=15,
    warmup_steps=40,
)
SMALL = Scale(
    preset="small",
    weights="bf16",
    layers=3,
    dense_layers=1,
    shapes=((2, 700), (3, 500)),
    steps=3,
    warmup_steps=4,
)


class WanderingSelector(AroundIndexer):
    """An indexer that is asked with queries of its own.

    Args:
        exact: the engine's indexer.
        heads: of its queries.
        queries: [steps, L, T, D] float32, of every step.
        thresholds: [L, S] float32, the engine's predictions; None: it has none.
        given: whether it is given predictions.

    Attributes:
        predictions: [steps, L * S] float32, what is written over the engine's in each step.
        steps: [1] int64, steps that were taken.
    """

    def __init__(
        self,
        exact: Indexer,
        heads: int,
        queries: Tensor,
        thresholds: Tensor | None,
        *,
        given: bool,
    ) -> None:
        super().__init__(exact)
        self.pages = exact.pages
        self._heads = heads
        self._queries = queries.bfloat16()
        steps, layers, rows, _ = queries.shape
        device = queries.device
        unused = torch.zeros(layers, rows, device=device)
        self._target = thresholds if given and thresholds is not None else unused
        self.predictions = torch.zeros(steps, self._target.numel(), device=device)
        self.steps = torch.zeros(1, dtype=torch.int64, device=device)
        self._query = self._ones = torch.zeros(0)

    def query(self, step: Tensor) -> Tensor:
        """[L, T, H, D] bfloat16 of a step, the same in all heads."""
        query = self._queries.index_select(0, step)[0]
        return query[:, :, None].expand(-1, -1, self._heads, -1).contiguous()

    def begin_pass(self, batch: ForwardBatch) -> None:
        """See `Indexer`; queries and predictions of the step."""
        super().begin_pass(batch)
        self._query = self.query(self.steps)
        self._ones = torch.ones(batch.num_tokens, self._heads, device=self.steps.device)
        torch.index_select(self.predictions, 0, self.steps, out=self._target.view(1, -1))
        self.steps.add_(1)

    def select(
        self, index_layer: int, query: Tensor, weights: Tensor, batch: ForwardBatch
    ) -> Selection:
        """See `Indexer`; by the step's query, all heads weighing one."""
        return self._exact.select(index_layer, self._query[index_layer], self._ones, batch)


class WanderingEngine(DecodeEngine):
    """A decode engine whose queries wander.

    Args:
        loaded: the model.
        sizes: of the pools.
        queries: [steps, L, T, D] float32.
        shared: what the host pool lies in.
        side: one of SIDES.
    """

    def __init__(
        self, loaded: LoadedModel, sizes: PoolSizes, queries: Tensor, shared: SharedRows, side: str
    ) -> None:
        self._queries, self._side = queries, side
        offload = side != "resident"
        prefetch = "off" if side == "off" or not offload else "on"
        config = dataclasses.replace(loaded.engine_config, prefetch=prefetch)
        if not offload:
            sizes = dataclasses.replace(sizes, offload=False, device_tokens=sizes.host_tokens)
        self._shared = shared
        super().__init__(dataclasses.replace(loaded, engine_config=config), sizes, None, shared)
        self.wandering.steps.zero_()  # capturing a graph takes a step

    @property
    def wandering(self) -> WanderingSelector:
        """What selects."""
        assert isinstance(self.selector, WanderingSelector)
        return self.selector

    def _fill(self, *, rows: bool) -> None:
        """The same rows on every side."""
        super()._fill(rows=False)
        if not rows:
            return
        cache, layers = self.engine.cache, self.loaded.config.num_hidden_layers
        slots, row_bytes = cache.rows(0).shape
        whole = self._shared.memory[: layers * slots * row_bytes].view(layers, slots, row_bytes)
        for layer, held in enumerate(whole):
            cache.rows(layer).copy_(held)

    def _keep_selector(self, indexer: Indexer, source: SelectionSource | None) -> TokenSelector:
        self._indexer = indexer
        prefetcher = indexer._prefetcher
        self.selector = WanderingSelector(
            indexer,
            self.loaded.config.index_n_heads,
            self._queries,
            None if prefetcher is None else prefetcher.predictions.thresholds,
            given=bool(SIDES[self._side]),
        )
        return self.selector


@torch.inference_mode()
def ranked_predictions(decode: WanderingEngine, context: int) -> dict[str, Tensor]:
    """[steps, L * S] float32 of each kind: scores of rank k, and of ranks that were recorded.

    Args:
        decode: an engine whose requests are running.
        context: tokens that each had computed at first.
    """
    wandering, kernels = decode.wandering, decode.loaded.kernels
    device, topk = decode.loaded.device, wandering.topk
    running = decode.engine.scheduler.running
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    tables = torch.tensor([one.block_ids[: blocks_for(context)] for one in running], **ints)
    rows = torch.arange(len(running), **ints)
    lengths = torch.full((len(running),), context, **ints)
    slots = torch.tensor([one.request_slot for one in running], device=device)
    steps, layers, _, _ = decode._queries.shape
    generator = torch.Generator(device).manual_seed(3)
    ranks = (torch.tensor(recorded.CANDIDATES, device=device) * topk).round().long()
    most = min(4 * topk, context)
    found = {
        kind: torch.full((steps, layers, decode.sizes.batch), torch.inf, device=device)
        for kind in ("true", "recorded")
    }
    for step in range(steps):
        query = wandering.query(torch.tensor([step], device=device))
        for layer, pages in enumerate(wandering.pages):
            scores = kernels.index_scores(
                query[layer, : len(running)],
                torch.ones(len(running), query.shape[2], device=device),
                *(pages, decode.loaded.index_key_format, tables, rows, lengths, context),
            )
            best = scores.topk(most, dim=1).values
            drawn = torch.randint(len(ranks), (len(running), 1), generator=generator, device=device)
            found["true"][step, layer, slots] = best[:, topk - 1]
            chosen = best.gather(1, ranks[drawn].clamp(1, most) - 1)
            found["recorded"][step, layer, slots] = chosen[:, 0]
    return {kind: values.flatten(1) for kind, values in found.items()}


class Case:
    """One shape: an engine a side, in turns.

    Args:
        loaded: the model.
        shared: host memory for it.
        batch: requests.
        context: tokens of each.
        how: the command line.
        scale: sizes.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        shared: SharedRows,
        batch: int,
        context: int,
        how: argparse.Namespace,
        scale: Scale,
    ) -> None:
        self._loaded, self._how = loaded, how
        self.batch, self.context = batch, context
        self._warmup = how.warmup_steps or scale.warmup_steps
        self._steps = how.steps or scale.steps
        steps = room(how, scale)
        config, device = loaded.config, loaded.device
        dim, layers = config.index_head_dim, len(config.index_layers)
        self.angle = wandering.angle_for(how.hit_rate, config.index_topk, context, dim, device)
        say(f"{batch} x {context}: {self.angle:.4f} radians a step")
        rows = max(batch, loaded.kernels.token_tile or 0)
        generator = torch.Generator(device).manual_seed(2)
        ways = wandering.directions(steps, layers * rows, dim, self.angle, generator)
        queries = ways.view(steps, layers, rows, dim)
        sizes = sizes_of(loaded, batch, context, steps)
        self.timers: dict[str, StepTimer] = {}
        predictions: dict[str, Tensor] = {}
        for side, kind in SIDES.items():
            decode = WanderingEngine(loaded, sizes, queries, shared, side)
            decode.add_requests([context] * batch, steps, "step")
            if kind:
                decode.wandering.predictions.copy_(predictions[kind])
            timer = self.timers[side] = StepTimer(decode)
            timer.warm_up(0, 1)
            if not predictions:
                say(f"{batch} x {context}, {side}: first step")
                predictions = ranked_predictions(decode, context)
                say(f"{batch} x {context}: predictions")
            timer.warm_up(0, self._warmup)
            say(f"{batch} x {context}, {side}: warm")

    def measure(self) -> dict[str, Any]:
        """Step times and rows of every side; tokens compared.

        Raises:
            EchoKVError: sides decoded different tokens.
        """
        for round_ in range(self._how.rounds):
            for side in turns.order(self.timers, round_):
                self.timers[side].measure(self._steps)
        tokens = [timer.tokens for timer in self.timers.values()]
        if any(one != tokens[0] for one in tokens):
            raise EchoKVError(f"{self.batch} x {self.context}: sides decoded different tokens")
        layers = self._loaded.config.num_hidden_layers
        row_bytes = self._loaded.row_format.row_bytes
        off = self.timers["off"].step_ms
        return {
            "batch": self.batch,
            "context": self.context,
            "radians_a_step": self.angle,
            "gib": layers * self.batch * self.context * row_bytes / 2**30,
            "device_slots": self.timers["off"].decode.sizes.device_tokens,
            "same_tokens": sum(len(one) for one in tokens[0].values()),
            "variants": {side: _figures(timer, off, layers) for side, timer in self.timers.items()},
        }

    def profile(self, sides: Sequence[str]) -> dict[str, Any]:
        """A layer's kernels on each stream, side by side."""
        found = {}
        for side in sides:
            kernels = timeline.kernels_of(self.timers[side].decode.engine.step, PROFILED_STEPS)
            rows = timeline.layer_timeline(kernels, "quantise_query", "_rms_norm")
            found[side] = {"layer": timeline.figures(rows)}
            print(f"-- {self.batch} x {self.context}, {side}")
            for row in rows:
                print(f"{row.start_us:8.1f} {row.us:7.1f}  {row.stream:4d}  {row.name}")
        return found

    def close(self) -> None:
        """Free the engines; the model and the host memory stay."""
        for timer in self.timers.values():
            timer.decode.close()
        self.timers.clear()


def _figures(timer: StepTimer, off: Sequence[float], layers: int) -> dict[str, Any]:
    pairs = list(zip(timer.before.layers, timer.after.layers, strict=True))

    def moved(name: str) -> float:
        rows = sum(getattr(new, name) - getattr(old, name) for old, new in pairs)
        return float(rows) / timer.steps / len(pairs)

    step = spread(timer.step_ms)
    saved = statistics.median(a - b for a, b in zip(off, timer.step_ms, strict=True))
    return {
        "step_ms": step,
        "gain": statistics.median(off) / step["median"],
        "saved_us_a_layer": saved * 1e3 / layers,  # of the same steps
        "rows_a_layer": {
            "selected": moved("selected_rows"),
            "early": moved("prefetched_useful_rows"),
            "in_vain": moved("prefetched_wasted_rows"),
            "recalled": moved("recalled_rows"),
        },
    }


def room(how: argparse.Namespace, scale: Scale) -> int:
    """Tokens that a request may decode in all."""
    timed = how.rounds * ((how.steps or scale.steps) + 1)
    return (how.warmup_steps or scale.warmup_steps) + timed + PROFILED_STEPS + 4


def sizes_of(loaded: LoadedModel, batch: int, context: int, steps: int) -> PoolSizes:
    """Pools of one engine."""
    longest = context + steps
    return PoolSizes(
        offload=True,
        batch=batch,
        max_model_len=longest,
        host_tokens=batch * blocks_for(longest) * BLOCK_TOKENS,
        device_tokens=wandering.POOL * loaded.config.index_topk * batch,
    )


START = time.perf_counter()


def say(words: str) -> None:
    """Progress, with the time since the start."""
    print(f"{time.perf_counter() - START:6.1f} s  {words}", flush=True)


def main() -> int:
    """Run every shape, writing JSON after each; 1 when one failed."""
    how = _options()
    torch.manual_seed(1)
    scale = SMALL if how.small else REAL
    raw = preset_config(
        scale.preset,
        num_layers=how.num_layers or scale.layers,
        dense_layers=scale.dense_layers,
        weights=scale.weights,
    )
    shapes = how.shapes or scale.shapes
    result: dict[str, Any] = report.environment(how.commit) | {"hit_rate": how.hit_rate}
    failed = False
    with TemporaryDirectory(prefix="echokv-prefetch-") as folder:
        config = EngineConfig(model=folder, backend=how.backend, max_waiting_requests=2**20, seed=1)
        loaded = LoadedModel.make(raw, Path(folder), config)
        say("weights")
        steps = room(how, scale)
        shared = SharedRows(
            loaded, max(sizes_of(loaded, *shape, steps).host_tokens for shape in shapes)
        )
        say(f"{shared.memory.numel() / 2**30:.1f} GiB of host rows")
        result |= {"model": decode_report.run_figures(loaded, scale.preset), "cases": []}
        for batch, context in shapes:
            try:
                case = Case(loaded, shared, batch, context, how, scale)
                figures = case.measure()
                _show(figures)
                if (batch, context) in (how.profile or ()):
                    figures["profile"] = case.profile(how.sides)
                case.close()
            except EchoKVError as error:  # the other shapes still say something
                figures, failed = {"batch": batch, "context": context, "error": str(error)}, True
                say(str(error))
            result["cases"].append(figures)
            report.write_json(how.out, result)
        shared.close()
    return 1 if failed else 0


def _show(figures: dict[str, Any]) -> None:
    say(f"{figures['batch']} x {figures['context']}, {figures['gib']:.1f} GiB")
    for side, one in figures["variants"].items():
        step, rows = one["step_ms"], one["rows_a_layer"]
        print(
            f"  {side:11} {step['median']:7.3f} ms ({step['p10']:.3f} to {step['p90']:.3f})"
            f" {one['gain']:.3f}x {one['saved_us_a_layer']:7.1f} us a layer; rows: "
            + ", ".join(f"{what} {count:,.0f}" for what, count in rows.items()),
            flush=True,
        )


def _shape(words: str) -> tuple[int, int]:
    batch, _, context = words.partition("x")
    return int(batch), int(context)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", help="of the code; default: the git checkout's")
    parser.add_argument("--small", action="store_true", help="toy sizes, for a CPU")
    parser.add_argument("--backend", default="auto", help="auto, reference, triton or cuda")
    parser.add_argument("--num-layers", type=int, help="of the model; default 10, one dense")
    parser.add_argument("--shapes", type=_shape, nargs="+", help="requests and context: 13x32768")
    parser.add_argument("--hit-rate", type=float, default=0.95, help="of each step's selections")
    parser.add_argument("--steps", type=int, help="timed, of each side and round; default 15")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument("--warmup-steps", type=int, help="before any is timed; default 40")
    parser.add_argument("--profile", type=_shape, nargs="+", help="shapes whose layers to lay out")
    parser.add_argument("--sides", nargs="+", default=["off", "on, learnt"], help="to profile")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
