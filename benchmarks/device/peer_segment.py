"""Index scores, top-k and residency of one layer beside SGLang's, ours with prefetch and without.

Used by peer_sglang.py. Both sides select by scores of the same keys and queries, new queries in
every round, and both begin a round with the same rows on the device (peer_case.py).

    HiSparse  DeepGEMM's logits from a query that is quantised already, SGLang's faster top-k, and
              the swap-in of what that found
    off       `Indexer.select` from the bf16 query, then `make_resident`
    perfect   the same with prefetch; predictions are the true k-th scores
    recorded  predictions are as far off, in ranks, as recorded

A round has every variant once, from the same state; who goes first changes. The first rounds are
not counted: results of the first of them are checked, and limits of prefetches are learnt in all of
them, by each of the two for itself. Victims are listed before the clock starts, and what is learnt
at the end of a step, once for all layers, comes after it.
"""

import copy
import statistics
from collections.abc import Callable
from typing import Any, Protocol

import prefetch as ahead  # benchmarks/device/prefetch.py
import torch
import turns  # benchmarks/device/turns.py
from index_scores import Case as Scored  # benchmarks/device/index_scores.py
from index_scores import DeepGemm
from peer_case import Case, bring  # benchmarks/device/peer_case.py
from sglang_kernels import HiSparse, TopK  # benchmarks/device/sglang_kernels.py
from torch import Tensor

import cache as common  # benchmarks/device/cache.py
from echokv.indexer.threshold import Predictions
from echokv.kernels.reference.index_keys import quantise_ue8m0, rotate

KINDS = ("off", "perfect", "recorded")
"""Our variants."""


class Logits(Protocol):
    """What SGLang's side selects by."""

    def __call__(self, layer: int) -> Tensor:
        """Scores of a layer's queries: [T, W] float32, whatever past the contexts."""
        ...

    def take(self, case: Case) -> None:
        """From now on the queries are the case's current ones."""
        ...


class DeepGemmLogits:
    """DeepGEMM's, each layer's queries quantised beforehand."""

    def __init__(self, case: Case) -> None:
        batch = case.batch
        scored = (
            Scored(
                query, weights, [pages], batch.block_tables, batch.request_rows,
                batch.context_lens, case.context,
            )
            for query, weights, pages in zip(
                case.query, case.weights, case.world.plain.pages, strict=True
            )
        )  # fmt: skip
        self._layers = [DeepGemm(one) for one in scored]

    def __call__(self, layer: int) -> Tensor:
        """See `Logits`."""
        return self._layers[layer](0)

    def take(self, case: Case) -> None:
        """See `Logits`."""
        for layer, query, weights in zip(self._layers, case.query, case.weights, strict=True):
            codes, factors = quantise_ue8m0(rotate(query))
            layer.query.copy_(codes[:, None])
            layer.weights.copy_(weights * factors * query.shape[2] ** -0.5)


class Peer:
    """SGLang's side of a case: its caches over the same host rows, and its top-k.

    Args:
        case: the shape.
        logits: its scores.
        topk: its top-k.
        cache: its caches, whose hot buffers have as many rows as the case says.
    """

    def __init__(self, case: Case, logits: Logits, topk: TopK, cache: HiSparse) -> None:
        self._case, self._logits, self._topk, self._cache = case, logits, topk, cache
        shape = (case.world.sizes.layers, case.batch_size, case.world.sizes.topk)
        self.positions = torch.full(shape, -1, dtype=torch.int32, device=case.world.device)

    def take(self, generator: torch.Generator) -> None:
        """The case's queries, and what its layers hold, in places of any order."""
        self._logits.take(self._case)
        for layer, held in enumerate(self._case.held):
            noise = torch.rand(held.ages.shape, generator=generator, device=held.ages.device)
            places, tokens = noise.argsort(dim=1), self._cache.tokens[layer]
            tokens.scatter_(1, places, held.positions.int())
            oldest = held.ages.argsort(dim=1, descending=True, stable=True)
            self._cache.order[layer].copy_(places.gather(1, oldest))

    def bring_rows(self) -> None:
        """Copy the rows that are held to where they are said to be; a check needs them."""
        for layer, rows in enumerate(self._cache.rows):
            tokens = self._cache.tokens[layer, :, :-1].long()
            places = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
            places = places.view(tokens.shape[0], -1)[:, :-1]
            host_slots = self._case.host_slots.gather(1, tokens).int()
            bring(self._case.world, layer, host_slots, places, rows)

    def run(self) -> None:
        """Scores, top-k and swap-in of all layers."""
        for layer, positions in enumerate(self.positions):
            self._topk(self._logits(layer), positions)
            self._cache.swap_in(layer, positions)

    def check(self) -> int:
        """Sets are top-k of its scores, rows are host's; most rows that ours doesn't select.

        Its scores aren't quite ours: they are added up in another order.

        Raises:
            AssertionError: they aren't.
        """
        case, others = self._case, 0
        for layer, found in enumerate(self.positions):
            positions = found.long()
            scores = self._logits(layer)[:, : case.context]
            assert is_topk(scores, positions), "another set"
            where = case.host_slots.gather(1, positions).flatten().cpu()
            rows = self._cache.rows[layer][self._cache.found[layer].flatten().long()]
            assert torch.equal(rows.cpu(), case.world.host.rows[layer][where]), "other bytes"
            ours = torch.zeros_like(scores, dtype=torch.bool)
            ours.scatter_(1, case.selection(layer).positions.long(), True)
            others = max(others, int((~ours.gather(1, positions)).sum(dim=1).max()))
        assert others <= positions.shape[1] // 32, f"{others} rows of a request aren't ours"
        return others

    def tokens(self) -> Tensor:
        """What its caches hold now, by place."""
        return self._cache.tokens.clone()


def is_topk(scores: Tensor, positions: Tensor) -> bool:
    """Whether positions [T, k] int64 are distinct and none scores [T, W] less than it may."""
    want = scores.topk(positions.shape[1], dim=1).values
    found = scores.gather(1, positions).sort(dim=1, descending=True).values
    ordered = positions.sort(dim=1).values
    return torch.equal(found, want) and bool((ordered[:, 1:] > ordered[:, :-1]).all())


class Round:
    """One shape's variants, captured, and what they are called with.

    Args:
        case: the shape.
        peer: SGLang's side of it.
    """

    def __init__(self, case: Case, peer: Peer) -> None:
        self._case, self._peer = case, peer
        self._generator = torch.Generator(device=case.world.device).manual_seed(5)
        self._missing = 0.1
        self.others = 0  # rows of a request that SGLang selects and we don't
        self.draw()
        self._theirs, _ = ahead.graph_of(lambda: [peer.run()], case.world.device)
        case.restore("off", None)
        off = ahead.graphs_of(case, case.world.plain)
        case.restore("perfect", None)
        on = ahead.graphs_of(case, case.world.ahead)
        self._ours = {name: off if name == "off" else on for name in KINDS}
        self._learnt: dict[str, Predictions] = {}
        self._taken: dict[str, Tensor | None] = {}

    def begin(self, missing: float) -> None:
        """Of what follows, such a share of the selected rows is missing; nothing is learnt yet."""
        self._missing, self._learnt, self._taken = missing, {}, {}

    def draw(self) -> None:
        """What a round begins with, on both sides."""
        self._case.draw(self._missing, self._generator)
        self._peer.take(self._generator)

    def run(
        self, name: str, others: Callable[[], None], *, check: bool
    ) -> tuple[float, dict[str, float], float | None]:
        """One variant.

        Args:
            name: "HiSparse" or one of ours.
            others: what runs before the clock starts.
            check: whether rows are brought before, and compared after it.

        Returns:
            Microseconds; rows a layer that came after the top-k, that came before, and that were
            useful of those; microseconds at the end of the step.
        """
        case, layers = self._case, self._case.world.sizes.layers
        device = case.world.device
        if name == "HiSparse":
            if check:
                self._peer.bring_rows()
            tokens = self._peer.tokens()
            others()
            us = common.clock(self._theirs, device)
            swapped = int((self._peer.tokens() != tokens).sum())
            if check:
                self.others = max(self.others, self._peer.check())
                most = self.others * case.batch_size * layers
                assert abs(swapped - case.missing_rows) <= most, "other rows were missing"
            return us / layers, {"recalled": swapped / layers}, None
        replay, results, finish = self._ours[name]
        case.restore(name, self._learnt.get(name), self._taken.get(name))
        if check:
            case.bring_rows()
        before = case.world.manager.counters()
        others()
        us = common.clock(replay, device)
        self._taken[name] = case.world.taken()
        end = common.clock(finish, device)
        if name != "off":
            self._learnt[name] = copy.deepcopy(case.world.predictions)
        pairs = list(zip(before, case.world.manager.counters(), strict=True))
        moved = {
            what: sum(getattr(new, what) - getattr(old, what) for old, new in pairs)
            for what in ("recalled", "prefetched", "useful")
        }
        if check:
            case.check_rows(results)
            assert name != "off" or moved["recalled"] == case.missing_rows, "other rows recalled"
        return us / layers, {what: rows / layers for what, rows in moved.items()}, end


def measure(
    case: Case,
    peer: Peer,
    others: Callable[[], None],
    shares: tuple[float, ...],
    repeats: int,
) -> list[dict[str, Any]]:
    """Microseconds a layer of every variant, by share of missing rows, and what moved.

    Args:
        case: the shape.
        peer: SGLang's side of it.
        others: what runs before each replay.
        shares: of the selected rows, that are missing.
        repeats: rounds that count.

    Raises:
        AssertionError: a variant selected or brought other rows than it should have.
    """
    rounds, found = Round(case, peer), []
    names = ("HiSparse", *KINDS)
    for missing in shares:
        rounds.begin(missing)
        times: dict[str, list[float]] = {name: [] for name in names}
        by_turn: dict[str, list[list[float]]] = {name: [[] for _ in names] for name in names}
        counts: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        ends: list[float] = []
        for round_ in range(-ahead.LEARNING, repeats):
            rounds.draw()
            for turn, name in enumerate(turns.order(names, round_)):
                us, moved, end = rounds.run(name, others, check=round_ == -ahead.LEARNING)
                if round_ < 0:
                    continue
                times[name].append(us)
                by_turn[name][turn].append(us)
                counts[name].append(moved)
                ends += [end] if name == "recorded" and end is not None else []
        us_of = {name: turns.spread(taken) for name, taken in times.items()}
        found.append({
            "part": "segment", "batch": case.batch_size, "context": case.context,
            "missing": missing, "us": us_of,
            "ratio": {
                name: us_of["HiSparse"]["median"] / us_of[name]["median"] for name in KINDS
            },
            "rows_a_layer": {
                name: {what: sum(one[what] for one in taken) / repeats for what in taken[0]}
                for name, taken in counts.items()
            },
            "median_us_by_turn": {
                name: [statistics.median(us) for us in taken if us]
                for name, taken in by_turn.items()
            },
            "end_of_step_us": turns.spread(ends)["median"],
            "selected_by_one_side_only": rounds.others,
        })  # fmt: skip
        print(line(found[-1]), flush=True)
    return found


def line(one: dict[str, Any]) -> str:
    """One share of a shape for a person."""
    us = ", ".join(
        f"{name} {taken['median']:.1f}" + (f" ({one['ratio'][name]:.2f}x)" if name in KINDS else "")
        for name, taken in one["us"].items()
    )
    rows = {name: [round(n) for n in row.values()] for name, row in one["rows_a_layer"].items()}
    return (f"segment, {one['batch']} x {one['context']}, {one['missing']:.0%} missing: {us} us |"
            f" recalled, prefetched, useful: {rows}")  # fmt: skip
