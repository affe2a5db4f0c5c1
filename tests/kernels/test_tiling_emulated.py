"""How `prefill_scores` divides its work, without a GPU: tiles.cuh against plain Python."""

import random
from itertools import groupby

import pytest
import torch
from tests.kernels import cuda_emulator
from tests.kernels.cuda_emulator import Emulator

from echokv.kernels.cuda.schedule import TILE_ROWS, UNIT_TOKENS

pytestmark = pytest.mark.skipif(cuda_emulator.COMPILER is None, reason="needs g++")

Segment = tuple[int, int, int]
"""First row, rows, tokens of the longest."""


def segments_of(lens: list[int], requests: list[int]) -> list[Segment]:
    """Rows of a tile that belong to one request, in order."""
    found = []
    keys = [(row // TILE_ROWS, request) for row, request in enumerate(requests)]
    for _, rows in groupby(range(len(lens)), key=keys.__getitem__):
        members = list(rows)
        found.append((members[0], len(members), max(0, *(lens[row] for row in members))))
    return found


def check(emulator: Emulator, lens: list[int], requests: list[int], blocks: int) -> None:
    """Every unit of every segment once, in order, in equal shares; and what is covered."""
    width = max(64, -(-max(lens) // 64) * 64)
    works, covered = emulator.tiling(
        torch.tensor(lens, dtype=torch.int32), torch.tensor(requests, dtype=torch.int32),
        width, blocks,
    )  # fmt: skip
    expected, ends = [], [0] * len(lens)
    for row, rows, tokens in segments_of(lens, requests):
        units = -(-tokens // UNIT_TOKENS)
        expected += [(row, rows, tokens, unit) for unit in range(units)]
        ends[row : row + rows] = [units * UNIT_TOKENS] * rows
    found, shares = [], []
    for of_block in works.tolist():
        mine = [
            (row, rows, tokens, unit + i)
            for row, rows, tokens, unit, units in of_block
            for i in range(units)
        ]
        found += mine
        shares.append(len(mine))
    assert found == expected
    assert max(shares) - min(shares) <= 1
    assert covered.tolist() == ends


@pytest.mark.parametrize("seed", range(12))
def test_mixed_passes(emulator: Emulator, seed: int) -> None:
    """Chunks of several requests, single rows, padding at the end."""
    rng = random.Random(seed)
    lens: list[int] = []
    requests: list[int] = []
    for request in range(rng.randint(1, 12)):
        queries = rng.choice([1, 1, 3, 8, 9, 40])
        context = queries + rng.choice([0, 1, 60, 127, 128, 5000])
        lens += range(context - queries + 1, context + 1)
        requests += [request] * queries
    padding = rng.choice([0, 0, 5])
    check(emulator, lens + [0] * padding, requests + [0] * padding, rng.choice([1, 2, 7, 132]))


def test_one_long_chunk(emulator: Emulator) -> None:
    """More tiles than a warp has lanes."""
    check(emulator, list(range(1, 301)), [0] * 300, 5)


def test_no_order_is_needed(emulator: Emulator) -> None:
    """Contexts of a request in any order."""
    rng = random.Random(1)
    lens = [rng.choice([-3, 0, 1, 64, 65, 700]) for _ in range(100)]
    check(emulator, lens, [row // 5 for row in range(100)], 3)


def test_only_padding(emulator: Emulator) -> None:
    check(emulator, [0] * 11, [0] * 11, 4)
