"""One layer's prefill segment, index scores, exact top-k and recall, with rows moving ahead or not.

    python benchmarks/device/prefill_segment.py --output prefill_segment.json            # on a GPU
    python benchmarks/device/prefill_segment.py --small --output small.json      # anywhere

The product's own path, captured as a graph so that the CPU's time doesn't count: `Indexer.select`
for the last queries of one request, then `CacheManager.make_resident` for all of them. Keys are
random.

    off          all queries are scored, then selected, then recalled
    resident     the same with nothing missing: what is left if all of the recall could be hidden
    on           in query blocks; a block's exact selection is recalled while the next is scored
    fused        rows above a histogram's bound move while later queries are scored
                 (`prefill_scores_prefetch`; --backend cuda)
    fused, late  and beside the top-k

`random` queries have nothing in common, so that nearly the whole context is selected; `overlapping`
ones are one query with a little noise, as neighbours in a text are. A share of the context is
resident before each run. Selections and the rows that arrive are checked to be the same.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import prefetch as decode  # benchmarks/device/prefetch.py
import torch
from torch import Tensor

import cache as common  # benchmarks/device/cache.py
from echokv.bench.report import environment
from echokv.cache.batch import ForwardBatch
from echokv.indexer.indexer import Indexer, Selection
from echokv.kernels.cuda import prefill_prefetch as inter
from echokv.memory.formats import IndexKeyFormat
from echokv.memory.slots import BLOCK_TOKENS, HostSlots

KEYS = IndexKeyFormat(name="fp8", head_dim=128)
NOISE = {"random": 1.0, "mixed": 0.4, "overlapping": 0.05}
"""Share of a query that is its own."""


class PrefillCase(decode.Case):
    """The last queries of one request over a world's keys."""

    def __init__(self, world: decode.World, queries: int, context: int) -> None:
        self.world, self.batch_size, self.context = world, queries, context
        sizes, device = world.sizes, world.device
        ints = {"dtype": torch.int32, "device": device}
        blocks = context // BLOCK_TOKENS
        table = torch.randperm(world.tokens // BLOCK_TOKENS, device=device)[:blocks]
        self.slots = (
            table[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=device)
        ).flatten().to(torch.int32)  # fmt: skip
        self.query = torch.zeros(sizes.layers, queries, sizes.heads, 128, device=device)
        self.weights = torch.zeros(sizes.layers, queries, sizes.heads, device=device)
        # The first query's k-th score stands for that of the chunk before.
        self.shifts = torch.zeros(sizes.layers, 1, device=device)
        positions = torch.arange(context - queries, context, **ints)
        self.batch = ForwardBatch(
            token_ids=torch.zeros(queries, dtype=torch.int64, device=device),
            positions=positions,
            context_lens=positions + 1,
            host_slots=HostSlots(torch.full((queries,), -1, **ints)),
            request_rows=torch.zeros(queries, **ints),
            request_slots=None,
            block_tables=table.to(torch.int32).view(1, blocks),
            sampled_rows=torch.zeros(0, dtype=torch.int64, device=device),
            max_context_len=context,
            num_context_rows=context,
            num_real_tokens=queries,
        )

    def draw(self, share: float, hit: float, generator: torch.Generator) -> list[Tensor]:
        """New queries, and a pool that has a share of the context; what else is selected."""
        world = self.world
        for drawn in (self.query, self.weights):
            common_part = torch.randn_like(drawn[:, :1])
            own = torch.empty_like(drawn).normal_(generator=generator)
            drawn.copy_((1 - share) * common_part.expand_as(drawn) + share * own)
        world.manager.begin_step()
        missing = []
        selections = [self.selection(layer) for layer in range(world.sizes.layers)]
        self.shifts.copy_(torch.stack([one.kth_scores[:1] for one in selections]))
        for layer, selection in enumerate(selections):
            resident, absent = self._split(self.slots, hit, generator)
            self._fill(layer, resident, generator)
            wanted = torch.zeros(world.host.num_slots, dtype=torch.bool, device=world.device)
            chosen = selection.host_slots.flatten()
            wanted[chosen[chosen >= 0].long()] = True
            missing.append(absent[wanted[absent.long()]])
        world.begin_step()
        return missing

    def _split(
        self, slots: Tensor, share: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """A random share of some host slots, and the rest."""
        order = torch.randperm(slots.shape[0], generator=generator, device=slots.device)
        count = round(share * slots.shape[0])
        return slots[order[:count]], slots[order[count:]]

    def run_fused(self, *, late: bool) -> list[tuple[Selection, Tensor]]:
        """The same with rows fetched while the scores are made; selection as the indexer's."""
        world, batch, results = self.world, self.batch, []
        manager, topk = world.manager, world.sizes.topk
        for layer in range(world.sizes.layers):
            target = manager.fused_layer(layer)
            assert target is not None
            scores, found = inter.prefill_scores_prefetch(
                self.query[layer], self.weights[layer], world.plain.pages[layer], KEYS,
                batch.block_tables, batch.request_rows, batch.context_lens, batch.max_context_len,
                self.shifts[layer], target, k=topk, most=self.context,
            )  # fmt: skip
            if late:
                with manager.side.fork(scores, found):
                    inter.fetch_late(found)
            positions, kth, slots, chosen = world.kernels.topk_rows(
                scores, batch.context_lens, topk, batch.request_rows, batch.block_tables
            )
            selection = Selection(positions, HostSlots(slots), chosen, kth)
            where = manager.make_resident(
                layer, selection.host_slots, chosen, max_distinct=self.context
            )
            results.append((selection, where))
        manager.end_step()
        return results

    def run(self, indexer: Indexer) -> list[tuple[Selection, Tensor]]:
        """The segment in every layer."""
        results = []
        for layer in range(self.world.sizes.layers):
            selection = indexer.select(layer, self.query[layer], self.weights[layer], self.batch)
            slots = self.world.manager.make_resident(
                layer, selection.host_slots, selection.scores, max_distinct=self.context
            )
            results.append((selection, slots))
        self.world.manager.end_step()
        return results


def measure(case: PrefillCase, kind: str, hit: float, blocks: tuple[int, ...]) -> dict[str, Any]:
    """Microseconds a layer without, and with each size of query block; interleaved."""
    world, generator = case.world, torch.Generator(device=case.world.device)
    runs: dict[str, Callable[[], Any]] = {"off": lambda: case.run(world.plain)}
    runs["resident"] = runs["off"]
    for block in blocks:
        runs[f"on, blocks of {block}"] = lambda block=block: in_blocks(case, block)
    if world.backend == "cuda":
        runs["fused"] = lambda: case.run_fused(late=False)
        runs["fused, late"] = lambda: case.run_fused(late=True)
    share_of = dict.fromkeys(runs, hit) | {"resident": 1.0}
    variants = {}
    for name, run in runs.items():
        generator.manual_seed(1)
        case.draw(NOISE[kind], share_of[name], generator)
        variants[name] = decode.graph_of(run, world.device)
    times: dict[str, list[float]] = {name: [] for name in variants}
    rows = 0.0
    for repeat in range(-1, world.sizes.repeats):
        for name, (replay, results) in variants.items():
            missing = case.draw(NOISE[kind], share_of[name], generator)
            taken = decode.microseconds(replay, world.flush)
            if repeat < 0:
                case.check(results, missing)
                rows = max(rows, sum(len(one) for one in missing) / world.sizes.layers)
            else:
                times[name].append(taken / world.sizes.layers)
    spreads = {name: common.spread(values) for name, values in times.items()}
    return {
        "backend": world.backend,
        "row_bytes": world.fmt.row_bytes,
        "queries": case.batch_size,
        "context": case.context,
        "selections": kind,
        "hit": hit,
        "rows_recalled": rows,
        "us": spreads,
        "speedup": {
            name: spreads["off"]["median"] / spread["median"] for name, spread in spreads.items()
        },
    }


def in_blocks(case: PrefillCase, block: int) -> list[tuple[Selection, Tensor]]:
    """The segment with the exact selection of each block recalled beside the next."""
    world, batch, results = case.world, case.batch, []
    for layer in range(world.sizes.layers):
        parts: list[Selection] = []
        for start in range(0, batch.num_tokens, block):
            if parts:
                last = parts[-1]
                world.manager.recall_ahead(
                    layer, last.host_slots, last.scores, max_distinct=case.context
                )
            rows = slice(start, start + block)
            part = replace(
                batch, request_rows=batch.request_rows[rows], context_lens=batch.context_lens[rows],
                token_ids=batch.token_ids[rows], num_real_tokens=len(batch.token_ids[rows]),
            )  # fmt: skip
            query, weights = case.query[layer, rows], case.weights[layer, rows]
            parts.append(world.plain.select(layer, query, weights, part))
        selection = Selection(
            *(
                torch.cat([getattr(part, field.name) for part in parts])
                for field in fields(Selection)
            )
        )
        slots = world.manager.make_resident(
            layer, selection.host_slots, selection.scores, max_distinct=case.context
        )
        results.append((selection, slots))
    world.manager.end_step()
    return results


def main() -> int:
    """Run, write JSON after each shape, say where."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--small", action="store_true", help="toy sizes, for any machine")
    parser.add_argument("--backends", nargs="+", help="default: triton and cuda, or reference")
    parser.add_argument("--contexts", nargs="+", type=int, default=[65_536])
    parser.add_argument("--queries", nargs="+", type=int, default=[256, 512])
    parser.add_argument("--hits", nargs="+", type=float, default=[0.5, 0.9])
    parser.add_argument("--blocks", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--repeats", type=int, default=7, help="runs of each variant")
    parser.add_argument("--code-commit", help="commit of the code, where git isn't")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = replace(decode.SMALL if args.small else decode.REAL, layers=2, batches=(1,))
    contexts = sizes.contexts if args.small else tuple(args.contexts)
    sizes = replace(sizes, contexts=contexts, repeats=1 if args.small else args.repeats)
    queries, blocks = ([9], (4,)) if args.small else (args.queries, tuple(args.blocks))
    report: dict[str, Any] = {
        "environment": environment(args.code_commit), "sizes": asdict(sizes), "segments": [],
    }  # fmt: skip
    backends = args.backends or (["triton", "cuda"] if device.type == "cuda" else ["reference"])
    for backend in backends:
        world = decode.World(sizes, backend, "fp8_ds_mla", device)
        for context, count in ((c, q) for c in contexts for q in queries):
            case = PrefillCase(world, count, context)
            for kind, hit in ((kind, hit) for kind in NOISE for hit in args.hits):
                fitting = tuple(block for block in blocks if block < count)
                report["segments"].append(measure(case, kind, hit, fitting))
                print(json.dumps(report["segments"][-1]), flush=True)
                args.output.write_text(json.dumps(report, indent=1))
        if device.type == "cuda":
            torch.cuda.synchronize()
        world.host.close()
    print(f"written: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
