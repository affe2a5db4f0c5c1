"""Index scores, exact top-k and recall of one layer, with decode prefetch and without.

    python benchmarks/device/prefetch.py --output prefetch.json            # on a GPU
    python benchmarks/device/prefetch.py --small --output small.json       # anywhere

The product's own path: `Indexer.select`, then `CacheManager.make_resident`, captured as a graph of
several layers, L2 overwritten before each replay; victims are chosen before the clock starts. Keys
and queries are random, new queries in every replay of every variant, so that nobody reads host rows
that another has just read; a given share of what they select is resident.
The pool is otherwise full of rows that nobody selects. The host rows of all layers that a graph
goes through are read in turn: `gib` says how much memory that is.

    off      no prefetch
    perfect  predictions are the true k-th scores
    on       predictions are as far off, in ranks, as the demo model's, and rows ranked near k are
             absent as often as in its traces, below k too (recorded.py)
    worst    predictions as in "on", none of the rows ranked k to 4k resident, and limits as if
             nothing had been learnt yet; elsewhere they are learnt, over replays before the clock
             starts too.

Selections are checked to be those without prefetch, and absent rows to arrive byte-equal to host.
`--small` runs the same code at toy sizes; its times mean nothing.
"""

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import recorded  # benchmarks/device/recorded.py
import torch
from torch import Tensor

import cache as common  # benchmarks/device/cache.py
from echokv.bench.report import environment
from echokv.cache.batch import ForwardBatch
from echokv.cache.manager import CacheManager
from echokv.indexer.indexer import Indexer, Selection
from echokv.indexer.prefetch import PrefetchBudget, Prefetcher
from echokv.indexer.threshold import Predictions
from echokv.kernels.fused_layer import BEGAN, TAKEN
from echokv.kernels.registry import load_kernels
from echokv.memory.formats import IndexKeyFormat, RowFormat
from echokv.memory.pools import DevicePool, HostPool
from echokv.memory.slots import BLOCK_TOKENS, HostSlots

LEARNING = 5
"""Replays before the timed ones, from which limits are learnt."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured: real sizes, or toy ones for a machine without a GPU."""

    layers: int
    device_slots: int
    topk: int
    heads: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    hits: tuple[float, ...]
    repeats: int
    row_formats: tuple[str, ...]


REAL = Sizes(
    layers=3,
    device_slots=200_000,
    topk=2048,
    heads=64,
    batches=(1, 2, 13),
    contexts=(32_768, 65_536, 98_304),
    hits=(0.5, 0.9, 0.97, 1.0),
    repeats=21,
    row_formats=("fp8_ds_mla", "bfloat16"),
)
SMALL = Sizes(
    layers=2,
    device_slots=400,
    topk=32,
    heads=4,
    batches=(1, 3),
    contexts=(256,),
    hits=(0.5, 0.9),
    repeats=1,
    row_formats=("fp8_ds_mla",),
)


class World:
    """Pools and keys for the largest shape, and the two ways of selecting over them."""

    def __init__(self, sizes: Sizes, backend: str, row_format: str, device: torch.device) -> None:
        self.sizes, self.device, self.backend = sizes, device, backend
        self.kernels = load_kernels(backend, device)
        self.fmt = RowFormat(name=row_format, latent_dim=512, rope_dim=64)
        self.tokens = max(sizes.batches) * max(sizes.contexts)
        slots = self.tokens + -(-sizes.device_slots // BLOCK_TOKENS) * BLOCK_TOKENS
        self.host = HostPool(sizes.layers, slots, self.fmt.row_bytes, device)
        common.fill_random(self.host.rows)
        pool = DevicePool(sizes.layers, sizes.device_slots, self.fmt.row_bytes, device)
        self.manager = CacheManager(self.kernels, self.host, pool)
        self.predictions = Predictions.create(sizes.layers, max(sizes.batches), device)
        pages = self._pages()
        key_format = IndexKeyFormat(name="fp8", head_dim=128)
        prefetcher = Prefetcher(
            self.kernels, self.manager, self.predictions, PrefetchBudget.of(self.fmt),
            tuple(range(sizes.layers)), sizes.topk,
        )  # fmt: skip
        self.manager.state.clock.fill_(1000)
        self.plain = Indexer(self.kernels, pages, key_format, sizes.topk)
        self.ahead = Indexer(self.kernels, pages, key_format, sizes.topk, prefetcher)
        self.prefetcher = prefetcher
        flush = 2**28 if device.type == "cuda" else 1
        self.flush = torch.empty(flush, dtype=torch.uint8, device=device)

    def _pages(self) -> Tensor:
        """Random keys in every page that a context has."""
        fmt = IndexKeyFormat(name="fp8", head_dim=128)
        pages = torch.zeros(
            (self.sizes.layers, self.tokens // BLOCK_TOKENS, fmt.page_bytes),
            dtype=torch.uint8, device=self.device,
        )  # fmt: skip
        step = 2**16
        for layer in pages:
            for start in range(0, self.tokens, step):
                slots = torch.arange(start, min(start + step, self.tokens), dtype=torch.int32)
                keys = torch.randn(len(slots), 128, device=self.device)
                self.kernels.write_index_keys(keys, slots.to(self.device), layer, fmt)
        return pages

    def put(self, layer: int, owners: Tensor, places: Tensor) -> None:
        """Have a layer's mappings say that these host slots are in these device slots, all it has.

        Args:
            layer: which.
            owners: [N_G] int32 host slots.
            places: [N_G] int32 device slots, each once.
        """
        state = self.manager.state.layer(layer)
        state.host_to_device.fill_(-1)
        state.host_to_device[owners.long()] = places
        state.device_to_host[places.long()] = owners
        state.device_free.fill_(0)

    def begin_step(self, taken: Tensor | None = None, *, prefetches: bool = False) -> None:
        """Begin a step over a pool that isn't what victims were listed from.

        Args:
            taken: [L] int32, slots that the step before took; None: none.
            prefetches: see `CacheManager.begin_step`.
        """
        ready = self.manager._ready
        if ready is not None:
            ready.forget()
            ready._cursors[:, BEGAN] = ready._cursors[:, TAKEN] - (0 if taken is None else taken)
        self.manager.begin_step(prefetches=prefetches)

    def taken(self) -> Tensor | None:
        """[L] int32, slots that this step has taken."""
        ready = self.manager._ready
        return None if ready is None else ready._cursors[:, TAKEN] - ready._cursors[:, BEGAN]


class Case:
    """One shape of a world: fixed inputs that graphs read, and a cache state before each replay."""

    def __init__(self, world: World, batch: int, context: int) -> None:
        self.world, self.batch_size, self.context = world, batch, context
        sizes, device = world.sizes, world.device
        blocks = context // BLOCK_TOKENS
        self.query = torch.zeros(sizes.layers, batch, sizes.heads, 128, device=device)
        self.weights = torch.zeros(sizes.layers, batch, sizes.heads, device=device)
        ints = {"dtype": torch.int32, "device": device}
        tables = torch.randperm(world.tokens // BLOCK_TOKENS, device=device)[: batch * blocks]
        self.batch = ForwardBatch(
            token_ids=torch.zeros(batch, dtype=torch.int64, device=device),
            positions=torch.full((batch,), context - 1, **ints),
            context_lens=torch.full((batch,), context, **ints),
            host_slots=HostSlots(torch.full((batch,), -1, **ints)),
            request_rows=torch.arange(batch, **ints),
            request_slots=torch.arange(batch, **ints),
            block_tables=tables.to(torch.int32).view(batch, blocks),
            sampled_rows=torch.arange(batch, device=device),
            max_context_len=context,
            num_context_rows=batch * context,
            num_real_tokens=batch,
        )

    def run(self, indexer: Indexer) -> list[tuple[Selection, Tensor]]:
        """The segment in every layer."""
        manager, results = self.world.manager, []
        indexer.begin_pass(self.batch)
        for layer in range(self.world.sizes.layers):
            selection = indexer.select(layer, self.query[layer], self.weights[layer], self.batch)
            slots = manager.make_resident(layer, selection.host_slots, selection.scores)
            results.append((selection, slots))
        return results

    def selection(self, layer: int, topk: int | None = None) -> Selection:
        """What the current queries select, without prefetch."""
        indexer = self.world.plain.with_topk(topk or self.world.sizes.topk)
        return indexer.select(layer, self.query[layer], self.weights[layer], self.batch)

    def prepare(
        self,
        hit: float,
        kind: str,
        generator: torch.Generator,
        *,
        near: bool = True,
        taken: Tensor | None = None,
        prefetches: bool = False,
    ) -> list[Tensor]:
        """New queries, their predictions, and a pool with a share of what they select.

        Args:
            hit: share of the selected rows that is resident.
            kind: of predictions: "perfect" or "recorded".
            generator: of everything random.
            near: whether rows ranked k to 4k are resident as recorded; else none is.
            taken: see `World.begin_step`.
            prefetches: likewise.

        Returns:
            for each layer the host slots that are selected and absent.
        """
        world = self.world
        self.query.normal_(generator=generator)
        self.weights.normal_(generator=generator)
        world.manager.begin_step()
        missing = []
        for layer in range(world.sizes.layers):
            slots, scores = self._ranked(layer)
            ranks = [world.sizes.topk] * self.batch_size
            if kind == "recorded":
                ranks = recorded.ranks(world.sizes.topk, slots.shape[1], self.batch_size, generator)
            predicted = scores.gather(1, torch.tensor(ranks, device=world.device)[:, None] - 1)
            world.predictions.thresholds[layer, : self.batch_size] = predicted[:, 0]
            absent = self._absent(hit, slots.shape[1], generator, near)
            self._fill(layer, slots[~absent], generator)
            missing.append(slots[:, : world.sizes.topk][absent[:, : world.sizes.topk]])
        world.begin_step(taken, prefetches=prefetches)
        return missing

    def _ranked(self, layer: int) -> tuple[Tensor, Tensor]:
        """[T, n] host slots and scores of the best rows, at most 4k of them, best first."""
        best = self.selection(layer, min(4 * self.world.sizes.topk, self.context))
        scores, order = best.scores.sort(dim=1, descending=True, stable=True)
        return best.host_slots.gather(1, order), scores

    def _absent(self, hit: float, ranks: int, generator: torch.Generator, near: bool) -> Tensor:
        """[T, ranks] bool: which rows aren't resident, exactly a share of the selected ones."""
        topk, device = self.world.sizes.topk, self.world.device
        share = recorded.absent_by_rank(hit, topk, ranks).to(device)
        noise = torch.rand(self.batch_size, ranks, generator=generator, device=device)
        absent = noise < share if near else torch.ones_like(noise, dtype=torch.bool)
        # Of the selected rows as many as asked for, each the likelier the larger its share.
        keys = noise[:, :topk].log() / share[:topk].clamp(min=1e-6)
        order = keys.flatten().argsort(descending=True)
        chosen = torch.zeros(order.shape[0], dtype=torch.bool, device=device)
        chosen[order[: round((1 - hit) * order.shape[0])]] = True
        absent[:, :topk] = chosen.view(-1, topk)
        return absent

    def _fill(self, layer: int, resident: Tensor, generator: torch.Generator) -> None:
        """Put some rows of the contexts into the pool, and rows of no context into its rest."""
        world, state = self.world, self.world.manager.state.layer(layer)
        slots = state.priority.shape[0]
        others = torch.arange(slots - resident.shape[0], device=world.device) + world.tokens
        owners = torch.cat([resident, others.to(torch.int32)])
        places = torch.randperm(slots, generator=generator, device=world.device).to(torch.int32)
        world.put(layer, owners, places)
        # Those of the contexts were selected lately, the others long ago.
        steps = torch.randint(4, 40, (slots,), generator=generator, device=world.device)
        steps[places[: resident.shape[0]].long()] %= 4
        floor = world.manager.state.floor
        state.priority.copy_((floor - 8 * steps).clamp(min=0))

    def check(self, results: list[tuple[Selection, Tensor]], missing: list[Tensor]) -> None:
        """What was absent is where it is said to be, and byte-equal to host."""
        world = self.world
        for layer, ((selection, slots), absent) in enumerate(zip(results, missing, strict=True)):
            truth = self.selection(layer).positions
            assert torch.equal(selection.positions, truth), "another selection"
            places = world.manager.state.host_to_device[layer][absent.long()]
            assert bool((places >= 0).all()), "a selected row is absent"
            rows = world.manager.rows(layer)[places.long()].cpu()
            assert torch.equal(rows, world.host.rows[layer][absent.long().cpu()]), "other bytes"
            where = world.manager.state.host_to_device[layer][selection.host_slots.long()]
            assert torch.equal(where, slots), "another device slot"


def graph_of(run: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """A replay of run, and what it returns; run itself without a GPU."""
    if device.type != "cuda":
        results: list[Any] = run()
        return lambda: results.__setitem__(slice(None), run()), results
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    return captured(run)


def captured(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """A replay of run, and what it returns."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph.replay, results


def graphs_of(case: Case, indexer: Indexer) -> tuple[Callable[[], None], Any, Callable[[], None]]:
    """Replays of all layers and of the end of the step, and what the first returns.

    A step ends once, however many layers it has: its end isn't part of a layer's time.
    """
    world = case.world

    def whole() -> Any:
        results = case.run(indexer)
        world.manager.end_step()
        return results

    if world.device.type != "cuda":
        return *graph_of(lambda: case.run(indexer), world.device), world.manager.end_step
    graph_of(whole, world.device)  # compiles, and learns nothing that stays
    replay, results = captured(lambda: case.run(indexer))
    return replay, results, captured(world.manager.end_step)[0]


def microseconds(replay: Callable[[], None], flush: Tensor) -> float:
    """One replay with a cold L2."""
    flush.zero_()
    return common.clock(replay, flush.device)


def measure(case: Case, hits: tuple[float, ...]) -> Iterator[dict[str, Any]]:
    """Every variant, interleaved; microseconds a layer."""
    world, sizes = case.world, case.world.sizes
    generator = torch.Generator(device=world.device).manual_seed(5)
    case.prepare(hits[0], "perfect", generator)
    off = graphs_of(case, world.plain)
    case.prepare(hits[0], "perfect", generator)
    on = graphs_of(case, world.ahead)
    variants = {
        "off": (off, "perfect", True),
        "perfect": (on, "perfect", True),
        "on": (on, "recorded", True),
        "worst": (on, "recorded", False),
    }
    for hit in hits:
        times: dict[str, list[float]] = {name: [] for name in variants}
        ends: list[float] = []
        counts: dict[str, list[int]] = {name: [0, 0, 0] for name in variants}
        learnt: dict[str, Predictions] = {}
        slots_taken: dict[str, Tensor | None] = {}
        for repeat in range(-LEARNING, sizes.repeats):
            for name, ((replay, results, finish), kind, near) in variants.items():
                missing = case.prepare(
                    hit, kind, generator, near=near, taken=slots_taken.get(name),
                    prefetches=name != "off",
                )  # fmt: skip
                recall_limits(world.predictions, None if name == "worst" else learnt.get(name))
                before = world.manager.counters()
                taken = microseconds(replay, world.flush) / sizes.layers
                slots_taken[name] = world.taken()
                end = microseconds(finish, world.flush)
                learnt[name] = copy.deepcopy(world.predictions)
                if repeat < 0:
                    continue
                times[name].append(taken)
                ends += [end] if name == "on" else []
                if repeat == 0:
                    case.check(results, missing)
                for old, new in zip(before, world.manager.counters(), strict=True):
                    counts[name][0] += new.recalled - old.recalled
                    counts[name][1] += new.prefetched - old.prefetched
                    counts[name][2] += new.useful - old.useful
        each = sizes.repeats * sizes.layers
        spreads = {name: common.spread(values) for name, values in times.items()}
        yield {
            "backend": world.backend,
            "row_bytes": world.fmt.row_bytes,
            "batch": case.batch_size,
            "context": case.context,
            "hit": hit,
            "gib": sizes.layers * case.batch_size * case.context * world.fmt.row_bytes / 2**30,
            "columns": world.prefetcher.rows_per_request(case.batch),
            "us": spreads,
            "end_of_step_us": common.spread(ends)["median"],
            "speedup": {
                name: spreads["off"]["median"] / spread["median"]
                for name, spread in spreads.items()
            },
            "rows_a_layer": {
                name: dict(
                    zip(("recalled", "prefetched", "useful"), (n / each for n in row), strict=True)
                )
                for name, row in counts.items()
            },
        }


def recall_limits(predictions: Predictions, learnt: Predictions | None) -> None:
    """Set what limits budgets to what was learnt, or to what a new request has."""
    if learnt is None:
        thresholds = predictions.thresholds
        learnt = Predictions.create(*thresholds.shape, thresholds.device)
    predictions.useful.copy_(learnt.useful)
    predictions.vain.copy_(learnt.vain)
    predictions.limits.copy_(learnt.limits)
    predictions.thresholds.masked_fill_(learnt.limits < 0, torch.inf)  # it rests


def parts(case: Case) -> dict[str, float]:
    """Microseconds a layer of each part alone."""
    world, kernels, batch = case.world, case.world.kernels, case.batch
    generator = torch.Generator(device=world.device).manual_seed(6)
    case.prepare(0.9, "perfect", generator)
    every = range(world.sizes.layers)
    pages, fmt = world.plain._pages, world.plain._fmt

    def score(layer: int) -> Tensor:
        return kernels.index_scores(
            case.query[layer], case.weights[layer], pages[layer], fmt, batch.block_tables,
            batch.request_rows, batch.context_lens, batch.max_context_len,
        )  # fmt: skip

    scores = [score(layer) for layer in every]
    works: dict[str, Callable[[int], object]] = {
        "index_scores": score,
        "topk": lambda layer: kernels.topk(scores[layer], batch.context_lens, world.sizes.topk),
        "select": lambda layer: world.plain.select(
            layer, case.query[layer], case.weights[layer], batch
        ),
    }
    found = {}
    for name, work in works.items():
        replay, _ = graph_of(lambda work=work: [work(layer) for layer in every], world.device)
        times = [
            microseconds(replay, world.flush) / world.sizes.layers
            for _ in range(world.sizes.repeats)
        ]
        found[name] = common.spread(times)["median"]
    return found


def main() -> int:
    """Run, write JSON after each shape, say where."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--small", action="store_true", help="toy sizes, for any machine")
    parser.add_argument("--backends", nargs="+", help="default: triton and cuda, or reference")
    parser.add_argument("--batches", nargs="+", type=int, help="instead of all")
    parser.add_argument("--contexts", nargs="+", type=int, help="instead of all")
    parser.add_argument("--repeats", type=int, help="replays of each variant")
    parser.add_argument("--layers", type=int, help="of a graph")
    parser.add_argument(
        "--row-formats", nargs="+", help="instead of both; others than the first at one shape only"
    )
    parser.add_argument("--code-commit", help="commit of the code, where git isn't")
    args = parser.parse_args()
    sizes = SMALL if args.small else REAL
    for name in ("batches", "contexts", "row_formats"):
        if getattr(args, name):
            sizes = replace(sizes, **{name: tuple(getattr(args, name))})
    for name in ("repeats", "layers"):
        if getattr(args, name):
            sizes = replace(sizes, **{name: getattr(args, name)})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backends = args.backends or (["triton", "cuda"] if device.type == "cuda" else ["reference"])
    report: dict[str, Any] = {
        "environment": environment(args.code_commit),
        "sizes": asdict(sizes),
        "segments": [],
        "parts": [],
    }
    for row_format in sizes.row_formats:
        for backend in backends:
            world = World(sizes, backend, row_format, device)
            for batch, context in shapes_of(sizes, row_format):
                case = Case(world, batch, context)
                shape = {"backend": backend, "row_bytes": world.fmt.row_bytes, "batch": batch,
                         "context": context}  # fmt: skip
                report["parts"].append(shape | {"us": parts(case)})
                print(json.dumps(report["parts"][-1]), flush=True)
                for one in measure(case, sizes.hits):
                    report["segments"].append(one)
                    print(line(one), flush=True)
                args.output.write_text(json.dumps(report, indent=1))
            if device.type == "cuda":
                torch.cuda.synchronize()
            world.host.close()
            del world, case
    print(f"written: {args.output}")
    return 0


def shapes_of(sizes: Sizes, row_format: str) -> list[tuple[int, int]]:
    """Batches and contexts, the largest first; of another row format than the first only that."""
    shapes = sorted(
        ((batch, context) for batch in sizes.batches for context in sizes.contexts), reverse=True
    )
    return shapes if row_format == sizes.row_formats[0] else shapes[:1]


def line(one: dict[str, Any]) -> str:
    """One segment for a person."""
    us = "  ".join(
        f"{name} {value['median']:6.1f} ({one['speedup'][name]:.2f}x)"
        for name, value in one["us"].items()
    )
    rows = {name: [round(n) for n in row.values()] for name, row in one["rows_a_layer"].items()}
    return (
        f"{one['backend']:>9} {one['row_bytes']:>5} B {one['batch']:>3} x {one['context']:>6}"
        f" hit {one['hit']:.2f} us: {us} | recalled, prefetched, useful: {rows}"
    )


if __name__ == "__main__":
    sys.exit(main())
