"""A shape of the decode segment whose rows two caches hold: ours, and one with hot buffers.

Knows our cache's state, and says what the other one has to hold (`held`): of each request as many
rows as a hot buffer has, in the same order of age. What is missing is drawn by rank as recorded
(recorded.py): near the k-th score, above it and below, more rows are absent. Ranks that have no
room any more are absent, too, and what room is left is filled with rows that nothing ranks.
"""

from dataclasses import dataclass

import prefetch as ahead  # benchmarks/device/prefetch.py
import recorded  # benchmarks/device/recorded.py
import torch
from torch import Tensor

from echokv.indexer.indexer import Selection
from echokv.indexer.threshold import Predictions
from echokv.memory.slots import BLOCK_TOKENS

UNRANKED = 64
"""Rows of a request, at least, that are on the device and that nothing ranks."""

SELECTED_AND_OLD = 0.25
"""How often a selected row that is there was out of use for long, over how often one of its rank is
absent; for other ranks it is 1. Then 2 to 4% of what leaves next is selected, as in the recordings:
the hit rate rises by 0.06 for each k more rows of a request up to 3.1 k, by 0.01 from there to
8.8 k (prefetch-study.json)."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one layer's caches hold when a round begins: of each request as many rows."""

    positions: Tensor  # [T, hot] int64, distinct in a row
    host_slots: Tensor  # [T, hot] int32
    ages: Tensor  # [T, hot] int64, steps since the last use


class Case(ahead.Case):
    """One shape of a world whose pool has `hot` slots a request.

    Attributes:
        hot: rows that a request has on the device when a round begins.
        host_slots: [T, context] int64.
        held: what is on the device, by layer.
        thresholds: [L, T] float32 predictions of each kind.
        missing_rows: selected rows of all layers and requests that aren't on the device.
    """

    def __init__(self, world: ahead.World, batch: int, context: int) -> None:
        super().__init__(world, batch, context)
        if world.device.type == "cuda":
            self.query = self.query.bfloat16()
        self.hot = world.sizes.device_slots // batch
        blocks = self.batch.block_tables.long()[:, :, None] * BLOCK_TOKENS
        offsets = torch.arange(BLOCK_TOKENS, device=world.device)
        self.host_slots = (blocks + offsets).view(batch, -1)[:, :context].contiguous()
        self.held: list[Held] = []
        self.thresholds: dict[str, Tensor] = {}
        self.missing_rows = 0
        self._places = torch.zeros(
            (world.sizes.layers, batch, self.hot), dtype=torch.int32, device=world.device
        )
        self._saved: dict[str, Tensor] = {}

    def draw(self, missing: float, generator: torch.Generator) -> None:
        """New queries, predictions of both kinds, and what is on the device.

        Args:
            missing: share of the selected rows that isn't.
            generator: of everything random.
        """
        world, k = self.world, self.world.sizes.topk
        self.query.normal_(generator=generator)
        self.weights.normal_(generator=generator)
        world.manager.begin_step()
        shape = (world.sizes.layers, self.batch_size)
        self.thresholds = {
            kind: torch.empty(shape, device=world.device) for kind in ("perfect", "recorded")
        }
        self.held, self.missing_rows = [], 0
        for layer in range(world.sizes.layers):
            best = self.selection(layer, 4 * k)
            scores, order = best.scores.sort(dim=1, descending=True, stable=True)
            ranks = recorded.ranks(k, scores.shape[1], self.batch_size, generator)
            columns = torch.tensor(ranks, device=world.device)[:, None] - 1
            self.thresholds["perfect"][layer] = scores[:, k - 1]
            self.thresholds["recorded"][layer] = scores.gather(1, columns)[:, 0]
            ranked = best.positions.long().gather(1, order)
            self.held.append(self._hold(ranked, missing, generator))
            self._put(layer, generator)
        self._saved = {name: value.clone() for name, value in vars(world.manager.state).items()}

    def _hold(self, ranked: Tensor, missing: float, generator: torch.Generator) -> Held:
        """Rows by rank as recorded, as far as there is room, then others."""
        k, (batch, ranks), device = self.world.sizes.topk, ranked.shape, ranked.device

        def noise(columns: int) -> Tensor:
            return torch.rand(batch, columns, generator=generator, device=device)

        there = ~self._absent(1 - missing, ranks, generator, near=True)
        there &= there.cumsum(dim=1) <= self.hot - UNRANKED
        self.missing_rows += int((~there[:, :k]).sum())
        unranked = noise(self.context).scatter_(1, ranked, 2.0)
        others = unranked.argsort(dim=1)[:, : self.hot]
        old = recorded.absent_by_rank(1 - missing, k, ranks).to(device)
        old[:k] *= SELECTED_AND_OLD
        ages = torch.where(noise(ranks) < old, 4 + 36 * noise(ranks), 4 * noise(ranks))
        ages = torch.cat([ages, 40 + 40 * noise(self.hot)], dim=1).long()
        chosen = torch.cat([there, torch.ones_like(others, dtype=torch.bool)], dim=1)
        columns = chosen.byte().argsort(dim=1, descending=True, stable=True)[:, : self.hot]
        positions = torch.cat([ranked, others], dim=1).gather(1, columns)
        return Held(
            positions=positions,
            host_slots=self.host_slots.gather(1, positions).int(),
            ages=ages.gather(1, columns),
        )

    def _put(self, layer: int, generator: torch.Generator) -> None:
        """Have the layer's mappings and priorities say what is held, in slots of any order."""
        state, held = self.world.manager.state, self.held[layer]
        slots = self.batch_size * self.hot
        places = torch.randperm(slots, generator=generator, device=self.world.device).int()
        self.world.put(layer, held.host_slots.flatten(), places)
        ages = held.ages.flatten().int()
        state.layer(layer).priority[places.long()] = (state.floor - 8 * ages).clamp(min=0)
        self._places[layer] = places.view_as(held.host_slots)

    def restore(self, kind: str, learnt: Predictions | None, taken: Tensor | None = None) -> None:
        """Begin a step as the round began, with the predictions of one kind.

        Args:
            kind: a variant of ours.
            learnt: what limits budgets; None: nothing is known.
            taken: slots that the step before took; see `World.begin_step`.
        """
        predictions = self.world.predictions
        for name, value in vars(self.world.manager.state).items():
            value.copy_(self._saved[name])
        prefetches = kind in self.thresholds
        if prefetches:
            predictions.thresholds[:, : self.batch_size] = self.thresholds[kind]
            ahead.recall_limits(predictions, learnt)
        self.world.begin_step(taken, prefetches=prefetches)

    def bring_rows(self) -> None:
        """Copy the rows that are held to where they are said to be; a check needs them."""
        for layer, held in enumerate(self.held):
            bring(self.world, layer, held.host_slots, self._places[layer],
                  self.world.manager.rows(layer))  # fmt: skip

    def check_rows(self, results: list[tuple[Selection, Tensor]]) -> None:
        """What is selected is right, and its rows are host's, byte for byte.

        Args:
            results: of `run`, after `bring_rows`.

        Raises:
            AssertionError: it isn't.
        """
        for layer, (selection, slots) in enumerate(results):
            truth = self.selection(layer).positions
            assert torch.equal(selection.positions, truth), "another selection"
            rows = self.world.manager.rows(layer)[slots.flatten().long()]
            where = selection.host_slots.flatten().long().cpu()
            assert torch.equal(rows.cpu(), self.world.host.rows[layer][where]), "other bytes"


def bring(world: ahead.World, layer: int, host_slots: Tensor, places: Tensor, rows: Tensor) -> None:
    """Copy a layer's host rows: rows[places[i]] = row host_slots[i], for int32 of one shape."""
    sources, count = host_slots.flatten(), host_slots.numel()
    targets = torch.full((rows.shape[0],), -1, dtype=torch.int32, device=rows.device)
    targets[:count] = places.flatten()
    number = torch.tensor([count], dtype=torch.int32, device=rows.device)
    world.kernels.recall(sources, number, targets, world.host.rows[layer], rows)
