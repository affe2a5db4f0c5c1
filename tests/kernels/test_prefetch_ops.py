"""The prefetch ops of every backend against plain Python, entry by entry."""

import math
import random
import struct
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from echokv.kernels.prefetch_args import (
    NO_LIMIT,
    PROBES,
    RESTS,
    ROWS_FOR_A_USEFUL_ONE,
    row_budget,
)
from echokv.memory.slots import BLOCK_TOKENS

NAN, INF = math.nan, math.inf
MOST, RATE, LEAST = 24, 3000, 2
"""A budget that binds at some lengths and not at others."""


def single(value: float) -> float:
    """Rounded to fp32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


@dataclass
class Pass:
    """A decode pass: `lens` tokens of context a row, scores, and who is resident."""

    scores: list[list[float]]
    lens: list[int]
    tables: list[list[int]]
    request_rows: list[int]
    request_slots: list[int]
    thresholds: list[float]
    limits: list[int]
    host_to_device: list[int]

    def host_slot(self, row: int, position: int) -> int:
        block = self.tables[self.request_rows[row]][position // BLOCK_TOKENS]
        return block * BLOCK_TOKENS + position % BLOCK_TOKENS

    def candidates(self, row: int, most: int, rate: int, least: int) -> list[tuple[int, float]]:
        """(host slot, score), from the definition."""
        slot = self.request_slots[row]
        threshold = self.thresholds[slot] if slot >= 0 else INF
        if not threshold < INF:
            return []
        found = []
        for position in range(self.lens[row]):
            host_slot, score = self.host_slot(row, position), self.scores[row][position]
            if score >= threshold and self.host_to_device[host_slot] < 0:
                found.append((host_slot, score))
        return found[: max(0, min(most, least + self.lens[row] * rate // 65536, self.limits[slot]))]


def make_pass(lens: list[int], thresholds: list[float], seed: int, resident: float) -> Pass:
    """Rows share a pool of blocks, in which some of them share a prefix; tables are padded."""
    rng = random.Random(seed)
    width = max(1, -(-max(lens) // BLOCK_TOKENS))
    blocks = list(range(width * len(lens) + 3))
    rng.shuffle(blocks)
    tables = [blocks[row * width : (row + 1) * width] for row in range(len(lens))]
    for row in range(1, len(lens), 3):
        tables[row][0] = tables[row - 1][0]
    for row, length in enumerate(lens):
        used = -(-length // BLOCK_TOKENS)
        tables[row][used:] = [-1] * (width - used)
    slots = list(range(len(thresholds)))
    rng.shuffle(slots)
    request_slots = [slots[row] if rng.random() > 0.1 else -1 for row in range(len(lens))]
    scores = [
        [single(rng.choice([rng.gauss(0, 1), 0.5, -0.0, NAN])) for _ in range(width * BLOCK_TOKENS)]
        for _ in lens
    ]
    return Pass(
        scores, lens, tables, list(range(len(lens))), request_slots, thresholds,
        [rng.choice([-3, 0, 1, 9, NO_LIMIT, NO_LIMIT]) for _ in thresholds],
        [rng.randrange(90) if rng.random() < resident else -1 for _ in range(len(blocks) * 64)],
    )  # fmt: skip


def ints(values: list, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def floats(values: list, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def run_candidates(backend, one: Pass, most: int, rate: int, least: int) -> list[Tensor]:
    device = backend.device
    slots, scores, counts = backend.op("prefetch_candidates")(
        floats(one.scores, device), ints(one.lens, device), ints(one.tables, device),
        ints(one.request_rows, device), ints(one.request_slots, device),
        floats(one.thresholds, device), ints(one.limits, device),
        ints(one.host_to_device, device), most=most, rows_per_unit=rate, least=least,
    )  # fmt: skip
    assert slots.shape == scores.shape == (len(one.lens), most)
    for row in range(len(one.lens)):
        want = one.candidates(row, most, rate, least)
        padding = most - len(want)
        assert counts[row].item() == len(want)
        assert slots[row].tolist() == [slot for slot, _ in want] + [-1] * padding
        assert scores[row].tolist() == [score for _, score in want] + [-INF] * padding
    return [slots, scores, counts]


@pytest.mark.parametrize("lens", [[1], [0, 63, 64, 65], [2047, 2048, 2049, 5, 0], [4500, 130]])
@pytest.mark.parametrize("resident", [0.0, 0.7, 1.0])
def test_candidates(backend, lens: list[int], resident: float) -> None:
    thresholds = [0.3, -0.5, 1.5, 0.0, 0.5, INF][: len(lens) + 1]
    one = make_pass(lens, thresholds, len(lens) + int(9 * resident), resident)
    run_candidates(backend, one, MOST, RATE, LEAST)


@pytest.mark.parametrize("threshold", [0.0, INF, -INF, NAN, -1e30, 1e30])
def test_hostile_thresholds(backend, threshold: float) -> None:
    one = make_pass([700, 64, 1], [threshold] * 3, 5, 0.5)
    one.request_slots, one.limits = [2, 0, 1], [NO_LIMIT] * 3
    _, _, counts = run_candidates(backend, one, MOST, RATE, LEAST)
    assert (counts.sum() > 0) == (threshold <= 0)


@pytest.mark.parametrize(("most", "rate", "least"), [(1, 0, 0), (1, 0, 1), (900, 2**16, 2**20)])
def test_hostile_budgets(backend, most: int, rate: int, least: int) -> None:
    one = make_pass([700, 64, 1], [-INF] * 3, 6, 0.2)
    _, _, counts = run_candidates(backend, one, most, rate, least)
    assert counts.max() <= row_budget(700, most, rate, least)


def test_a_context_of_a_million_tokens_does_not_overflow_the_budget(backend, lazy_bytes) -> None:
    """length * rows_per_unit passes 2^31."""
    length, device = 2**20, backend.device
    scores = torch.full((1, length), -1.0, device=device)
    scores[0, -5:] = 1.0
    tables = torch.arange(length // BLOCK_TOKENS, dtype=torch.int32, device=device)[None]
    slots, _, counts = backend.op("prefetch_candidates")(
        scores, ints([length], device), tables, ints([0], device), ints([0], device),
        floats([0.0], device), ints([NO_LIMIT], device),
        torch.full((length,), -1, dtype=torch.int32, device=device),
        most=4, rows_per_unit=65535, least=0,
    )  # fmt: skip
    assert slots.tolist() == [list(range(length - 5, length - 1))]
    assert counts.tolist() == [4]


def learn(
    kth: float, scores: list[float], state: tuple[float, float, float, int]
) -> tuple[float, float, float, int]:
    """What one row teaches, from the docstring."""
    old, useful, vain, limit = state
    new = kth
    if limit < 0:
        limit = limit + 1 or PROBES
    if math.isfinite(old):
        new = single(single(0.5 * old) + single(0.5 * kth))
        reached = sum(score >= kth for score in scores)
        others = len(scores) - reached
        useful = single(0.5 * useful + 0.5 * reached) if math.isfinite(useful) else float(reached)
        vain = single(0.5 * vain + 0.5 * others) if math.isfinite(vain) else float(others)
        limit = int(PROBES + ROWS_FOR_A_USEFUL_ONE * useful)
        if limit == PROBES:
            limit = -RESTS
        elif vain <= useful:
            limit = NO_LIMIT
    if not math.isfinite(kth) or limit < 0:
        new = INF
    return new, useful, vain, limit


@pytest.mark.parametrize("most", [1, 7, 64, 300])
def test_learning(backend, most: int) -> None:
    rng, device, values = random.Random(most), backend.device, [0.0, INF, -INF, NAN, -1e30, 3e38]
    states, rows = 40, 30
    thresholds = [rng.choice([*values, single(rng.gauss(0, 1))]) for _ in range(states)]
    useful, vain = (
        [single(rng.choice([0.0, INF, 0.3, 2000.0, 9 * rng.random()])) for _ in range(states)]
        for _ in range(2)
    )
    limits = [rng.choice([NO_LIMIT, 8, 90, -1, -2, -RESTS]) for _ in range(states)]
    slots = rng.sample(range(states), rows)
    slots[3] = slots[17] = -1
    kth = [rng.choice([*values[:4], *[single(rng.gauss(0, 1))] * 4]) for _ in range(rows)]
    issued = [rng.randint(0, most) for _ in range(rows)]
    scores = [[single(rng.gauss(0.2, 1)) for _ in range(n)] for n in issued]
    padded = [row + [rng.choice([5.0, -INF])] * (most - len(row)) for row in scores]
    averages = floats(useful, device), floats(vain, device)
    state = floats(thresholds, device), *averages, ints(limits, device)
    backend.op("update_thresholds")(
        ints(slots, device), floats(kth, device), floats(padded, device), ints(issued, device),
        *state,
    )  # fmt: skip
    want = list(zip(thresholds, useful, vain, limits, strict=True))
    for row, slot in enumerate(slots):
        if slot >= 0:
            want[slot] = learn(kth[row], scores[row], want[slot])
    for tensor, column in zip(state, zip(*want, strict=True), strict=True):
        expected = torch.tensor(column, dtype=tensor.dtype)
        torch.testing.assert_close(tensor.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_rows_in_vain_dwindle_until_they_rest_and_useful_ones_bring_more(backend) -> None:
    """As many as the limit allows, two in five useful, then none, two in five again, then three."""
    device = backend.device
    unknown = floats([INF], device), floats([INF], device)
    state = floats([1.0], device), *unknown, ints([NO_LIMIT], device)
    limits = []
    for share in [0.4] * 8 + [0.0] * 20 + [0.4] * 16 + [0.6] * 8:
        issued = min(max(state[3].item(), 0), 100) if math.isfinite(state[0]) else 0
        useful = round(share * issued)
        scores = [2.0] * useful + [0.0] * (100 - useful)
        backend.op("update_thresholds")(
            ints([0], device), floats([1.0], device), floats([scores], device),
            ints([issued], device), *state,
        )  # fmt: skip
        limits.append(state[3].item())
        assert math.isfinite(state[0]) == (limits[-1] >= 0)
    assert limits[:8] == sorted(limits[:8]) and limits[7] > 100
    rest = [*range(-RESTS, 0), PROBES]
    start = limits.index(-RESTS)
    assert limits[7:start] == sorted(limits[7:start], reverse=True)
    assert limits[start : start + 8] == rest and limits[start + 8] == -RESTS
    assert 4 * PROBES < limits[43] < NO_LIMIT
    assert limits[-1] == NO_LIMIT


@pytest.mark.parametrize("entries", [0, 1, 63, 2048, 2049, 5000])
def test_counting_useful_rows(backend, entries: int) -> None:
    """Of some layers out of four, in any order."""
    rng, device = random.Random(entries), backend.device
    layers = [2, 0, 3]
    host_slots = [rng.sample(range(9000), entries) + [-1] * 5 for _ in layers]
    mapping = [[rng.randrange(-1, 300) for _ in range(9000)] for _ in range(4)]
    priority = [[rng.choice([-1, 7, 8, 9, 15]) for _ in range(300)] for _ in range(4)]
    totals = torch.full((4,), 2**33, device=device)

    def table(rows: list[list[int]]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int32, device=device)

    backend.op("count_useful")(
        table(host_slots), ints(layers, device), ints([8], device), table(mapping),
        table(priority), totals,
    )  # fmt: skip
    useful = [0] * 4
    for layer, slots in zip(layers, host_slots, strict=True):
        places = [mapping[layer][slot] for slot in slots if slot >= 0]
        useful[layer] = sum(place >= 0 and priority[layer][place] > 8 for place in places)
    assert totals.tolist() == [2**33 + count for count in useful]
