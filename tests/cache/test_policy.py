"""Priorities: later steps above earlier ones, better scores above worse, padding harmless."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.cache.harness import kernels_of

from echokv.cache.policy import RecencyThenScore
from echokv.memory.slots import HostSlots

Ask = Callable[[int, list[list[float]], list[list[int]]], list[list[int]]]


@pytest.fixture
def priorities(backend_name: str) -> Ask:
    """Asks the policy, from lists to lists."""
    kernels, device = kernels_of(backend_name)
    policy = RecencyThenScore(kernels)

    def ask(clock: int, scores: list[list[float]], slots: list[list[int]]) -> list[list[int]]:
        result = policy.priorities(
            torch.tensor([clock], dtype=torch.int32, device=device),
            torch.tensor(scores, device=device),
            HostSlots(torch.tensor(slots, dtype=torch.int32, device=device)),
        )
        assert result.dtype == torch.int32
        return result.tolist()

    return ask


def test_scores_rank_within_a_row_whatever_their_scale(priorities: Ask) -> None:
    for scale, shift in ((1.0, 0.0), (1e-6, 0.0), (1e6, -5e6), (-1.0, 0.0)):
        row = [x * scale + shift for x in (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)]
        levels = priorities(5, [row], [list(range(7))])[0]
        expected = [41, 42, 43, 44, 45, 46, 47]
        assert levels == (expected if scale > 0 else expected[::-1])


def test_every_later_step_is_above_every_earlier_one(priorities: Ask) -> None:
    scores, slots = torch.randn(3, 9).tolist(), [list(range(9))] * 3
    for clock in (1, 77, 2**28 - 2):
        highest = max(map(max, priorities(clock, scores, slots)))
        lowest = min(map(min, priorities(clock + 1, scores, slots)))
        assert highest < (clock + 1) << 3 < lowest < 2**31


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, in the interpreter
@pytest.mark.parametrize("value", [0.0, -3.5, math.inf, -math.inf])
def test_equal_scores_get_the_lowest_level(priorities: Ask, value: float) -> None:
    assert priorities(2, [[value] * 3], [[4, 5, 6]]) == [[17, 17, 17]]


def test_padding_does_not_take_part(priorities: Ask) -> None:
    """A padding score of -inf or garbage mustn't stretch the row's range."""
    for garbage in (-math.inf, math.inf, math.nan, 1e30):
        levels = priorities(1, [[1.0, 3.0, 7.0, garbage]], [[3, 5, 8, -1]])[0]
        assert levels[:3] == [9, 11, 15]
        assert 8 <= levels[3] <= 15


def test_rows_of_nothing_but_padding_stay_in_range(priorities: Ask) -> None:
    levels = priorities(1, [[-math.inf] * 4, [math.nan] * 4], [[-1] * 4] * 2)
    assert all(8 <= level <= 15 for row in levels for level in row)


def test_backends_agree_on_every_bit(priorities: Ask) -> None:
    """Against the definition, in exact fractions of the float32 that the division rounds to."""
    torch.manual_seed(3)
    scores = torch.cat([torch.randn(5, 65), torch.randn(1, 65) * 1e-38, torch.randint(9, (2, 65))])
    slots = [[-1 if (i + row) % 11 == 0 else i for i in range(65)] for row in range(8)]
    got = priorities(1000, scores.tolist(), slots)
    for row, places in enumerate(slots):
        chosen = scores[row][[i >= 0 for i in places]].numpy()
        low, high = chosen.min(), chosen.max()
        for i, slot in enumerate(places):
            level = 0
            if slot >= 0:
                place = (scores[row, i].numpy() - low) / (high - low) * np.float32(7)
                level = 1 + min(6, int(place))
            assert got[row][i] == 8000 + level
