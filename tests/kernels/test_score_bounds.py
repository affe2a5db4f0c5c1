"""Bounds of selections by a histogram, on every backend, against plain Python."""

import math
import random
import struct

import pytest
import torch
from torch import Tensor

NAN, INF = math.nan, math.inf


def single(value: float) -> float:
    """Rounded to fp32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def bin_of(value: float) -> int:
    """Upper eight bits of a float's place among floats."""
    if value != value:
        value = -INF
    (bits,) = struct.unpack("I", struct.pack("f", value + 0.0))
    return (bits ^ 0xFFFFFFFF if bits >> 31 else bits | 1 << 31) >> 24


def least_of(number: int) -> float:
    """The least float of a bin."""
    key = number << 24
    (value,) = struct.unpack("f", struct.pack("I", key ^ (1 << 31 if key >> 31 else 0xFFFFFFFF)))
    return float(value)


def bound_of(scores: list[float], shift: float, k: int) -> float:
    """From the definition, by sorting."""
    bins = sorted((bin_of(single(score - shift)) for score in scores), reverse=True)
    if len(bins) < k:
        return -INF
    return NAN if bins[k - 1] == 255 else least_of(bins[k - 1] + 1)


def check(backend, rows: list[list[float]], shifts: list[float], requests: list[int], k: int):
    lens = [len(row) for row in rows]
    width = max(64, -(-max(lens) // 64) * 64)
    scores = torch.full((len(rows), width), NAN)
    for row, values in enumerate(rows):
        scores[row, : len(values)] = torch.tensor(values)
    device = backend.device
    ints = {"dtype": torch.int32, "device": device}
    bounds: Tensor = backend.op("score_bounds")(
        scores.to(device), torch.tensor(lens, **ints), torch.tensor(requests, **ints),
        torch.tensor(shifts, device=device), k,
    )  # fmt: skip
    want = [bound_of(row, shifts[request], k) for row, request in zip(rows, requests, strict=True)]
    expected = torch.tensor(want)
    torch.testing.assert_close(bounds.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    return want


@pytest.mark.parametrize("k", [1, 63, 64, 65, 500])
def test_bounds_of_awkward_lengths(backend, k: int) -> None:
    rng = random.Random(k)
    lens = [0, 1, k - 1, k, k + 1, 4095, 4096, 4097, 700]
    rows = [[single(rng.gauss(0, 2)) for _ in range(length)] for length in lens]
    want = check(backend, rows, [1.5, -0.25, 0.0], [row % 3 for row in range(len(rows))], k)
    for row, bound, request in zip(rows, want, range(len(rows)), strict=True):
        shift = [1.5, -0.25, 0.0][request % 3]
        reached = sum(single(score - shift) >= bound for score in row)
        assert reached == len(row) if len(row) < k else reached < k


@pytest.mark.parametrize("shift", [0.0, INF, -INF, NAN, -1e30, 3e38])
def test_hostile_shifts_and_scores(backend, shift: float) -> None:
    values = [0.0, -0.0, 1.0, INF, -INF, NAN, 1e-40, -1e-40, 3e38, -3e38]
    rng = random.Random(2)
    rows = [[single(rng.choice(values)) for _ in range(300)] for _ in range(3)]
    rows += [[value] * 130 for value in (0.0, NAN, INF, -INF)]
    check(backend, rows, [shift], [0] * len(rows), 100)


def test_a_good_shift_makes_a_close_bound(backend) -> None:
    """The nearer the shift to the k-th score, the fewer of the k are missed."""
    rng = random.Random(3)
    row = [single(rng.gauss(0, 1)) for _ in range(4000)]
    kth = sorted(row)[-200]
    found = []
    for shift in (0.0, kth + 0.1, kth + 0.001):
        (bound,) = check(backend, [row], [single(shift)], [0], 200)
        found.append(sum(single(score - single(shift)) >= bound for score in row))
    assert found[0] < found[1] < found[2] and found[2] > 195
