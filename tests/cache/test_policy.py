"""Priorities: later steps above earlier ones, better scores above worse, padding harmless."""

import math

import pytest
import torch

from echokv.cache.policy import RecencyThenScore
from echokv.memory.slots import HostSlots


def priorities(clock: int, scores: list[list[float]], slots: list[list[int]]) -> list[list[int]]:
    result = RecencyThenScore().priorities(
        torch.tensor([clock], dtype=torch.int32),
        torch.tensor(scores),
        HostSlots(torch.tensor(slots, dtype=torch.int32)),
    )
    assert result.dtype == torch.int32
    return result.tolist()


def test_scores_rank_within_a_row_whatever_their_scale() -> None:
    for scale, shift in ((1.0, 0.0), (1e-6, 0.0), (1e6, -5e6), (-1.0, 0.0)):
        row = [x * scale + shift for x in (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)]
        levels = priorities(5, [row], [list(range(7))])[0]
        expected = [41, 42, 43, 44, 45, 46, 47]
        assert levels == (expected if scale > 0 else expected[::-1])


def test_every_later_step_is_above_every_earlier_one() -> None:
    scores, slots = torch.randn(3, 9).tolist(), [list(range(9))] * 3
    for clock in (1, 77, 2**28 - 2):
        highest = max(map(max, priorities(clock, scores, slots)))
        lowest = min(map(min, priorities(clock + 1, scores, slots)))
        assert highest < (clock + 1) << 3 < lowest < 2**31


@pytest.mark.parametrize("value", [0.0, -3.5, math.inf, -math.inf])
def test_equal_scores_get_the_lowest_level(value: float) -> None:
    assert priorities(2, [[value] * 3], [[4, 5, 6]]) == [[17, 17, 17]]


def test_padding_does_not_take_part() -> None:
    """A padding score of -inf or garbage mustn't stretch the row's range."""
    for garbage in (-math.inf, math.inf, math.nan, 1e30):
        levels = priorities(1, [[1.0, 3.0, 7.0, garbage]], [[3, 5, 8, -1]])[0]
        assert levels[:3] == [9, 11, 15]
        assert 8 <= levels[3] <= 15


def test_rows_of_nothing_but_padding_stay_in_range() -> None:
    levels = priorities(1, [[-math.inf] * 4, [math.nan] * 4], [[-1] * 4] * 2)
    assert all(8 <= level <= 15 for row in levels for level in row)
