"""What an inter-query prefetch may have done to a layer, checked against plain Python.

When rows move is free, and in which order; which rows move in the end is not.
"""

import random

import torch
from tests.kernels.cache_model import LayerModel
from tests.kernels.prefetch_model import PrefetchCase, ints
from tests.kernels.resident_model import LayerUnderTest
from torch import Tensor

from echokv.kernels.cuda.prefill_prefetch import InterPrefetch
from echokv.kernels.fused_layer import TAKEN
from echokv.kernels.reference.score_bounds import score_bounds


class InterCase(PrefetchCase):
    """Chunks of several requests over a layer of the cache.

    Args:
        under_test: the layer.
        chunks: (context, queries) of each request; the first blocks of all are the same.
        rng: of everything random.
        shared: how many blocks.
    """

    def __init__(
        self,
        under_test: LayerUnderTest,
        chunks: list[tuple[int, int]],
        rng: random.Random,
        shared: int = 1,
    ) -> None:
        ids = rng.sample(
            range(under_test.model.host_slots // 64), under_test.model.host_slots // 64
        )
        common, own = ids[:shared], ids[shared:]
        counts = [-(-context // 64) for context, _ in chunks]
        tables = torch.full((len(chunks), max(1, *counts)), -1, dtype=torch.int32)
        lens, requests = [], []
        for request, ((context, queries), count) in enumerate(zip(chunks, counts, strict=True)):
            table = (common + [own.pop() for _ in range(max(0, count - shared))])[:count]
            tables[request, :count] = ints(table)
            lens += range(context - queries + 1, context + 1)
            requests += [request] * queries
        super().__init__(under_test, lens, tables, requests, rng)
        self.shifts = torch.full((len(chunks),), 0.8)

    def bounds(self, k: int) -> Tensor:
        """By the reference."""
        rows = ints(self.request_rows)
        return score_bounds(self.scores, ints(self.lens), rows, self.shifts, k)

    def wanted(self, k: int) -> set[int]:
        """Host slots that some row's bound lets in."""
        found = set()
        for row, (length, bound) in enumerate(zip(self.lens, self.bounds(k), strict=True)):
            request = self.request_rows[row]
            shifted = self.scores[row, :length] - self.shifts[request]
            table = self.tables[request].tolist()
            positions = (shifted >= bound).nonzero().squeeze(1).tolist()
            assert length < k or len(positions) < k
            found |= {table[at // 64] * 64 + at % 64 for at in positions}
        return found

    def check_bounds(self, found: InterPrefetch, k: int) -> None:
        """Those of rows that see anything are the reference's."""
        bounds, live = self.bounds(k), ints(self.lens) > 0
        got = found.bounds.cpu()
        assert ((got == bounds) | (got.isnan() & bounds.isnan()))[live].all()

    def check_fetched(
        self, found: InterPrefetch, ready: list[int], floor: int, before: LayerModel
    ) -> set[int]:
        """Each row has moved once, and the layer is what they come to."""
        fetched = found.host_slots[found.host_slots >= 0].tolist()
        assert len(set(fetched)) == len(fetched), "fetched twice"
        self._check_state(before, ready, floor, set(fetched))
        return set(fetched)

    def _check_state(
        self, before: LayerModel, ready: list[int], floor: int, fetched: set[int]
    ) -> None:
        layer, held = self.layer, self._check_rows(before)
        taken = ready[: int(layer.cursor[TAKEN])]
        free_to_go = [slot for slot in taken if before.held.get(slot, (0, -1))[1] < floor]
        assert {owner for owner, _ in held.values()} >= fetched
        assert {slot for slot, (owner, _) in held.items() if owner in fetched} == set(free_to_go)
        assert len(free_to_go) == len(fetched), "a slot has leaked"
        untouched = {slot: v for slot, v in before.held.items() if slot not in free_to_go}
        now = {slot: (owner, floor) for slot, (owner, _) in held.items() if owner in fetched}
        assert held == untouched | now
        left = [slot for slot in free_to_go if slot in before.held]
        assert layer.totals.tolist() == [0, len(fetched), len(left), 0, len(fetched)]
        layer.model.held = held

    def check_all(self, fetched: set[int], before: LayerModel, k: int, most: int) -> None:
        """What was fetched in all is what was wanted and absent, as far as `most` goes."""
        wanted = self.wanted(k)
        assert fetched <= wanted and len(fetched) <= most
        if len(wanted) <= most:
            held = {owner for owner, _ in before.held.values()}
            assert fetched >= wanted - held, "left absent"
