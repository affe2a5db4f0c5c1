"""Pieces cover a pass, fit the pool, and couldn't be longer: against sets."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from echokv.attention.pieces import fresh_rows, plan_pieces


class Waits(TorchDispatchMode):
    """Counts how often the CPU would wait for a device's numbers."""

    number = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def selections(rows: int, topk: int, population: int, seed: int) -> Tensor:
    """Distinct slots a row, some rows with fewer than topk, some with none."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.full((rows, topk), -1, dtype=torch.int32)
    for row in out:
        count = min(population, int(torch.randint(0, topk + 1, (), generator=generator)))
        row[:count] = torch.randperm(population, generator=generator)[:count].to(torch.int32)
    return out


def chosen(host_slots: Tensor, rows: slice) -> set[int]:
    return set(host_slots[rows].flatten().tolist()) - {-1}


@settings(deadline=None, max_examples=200)
@given(
    rows=st.integers(1, 40),
    topk=st.integers(1, 9),
    population=st.integers(1, 60),
    spare=st.integers(0, 70),
    seed=st.integers(0, 10**6),
)
def test_pieces_cover_every_row_fit_and_are_as_long_as_can_be(
    rows: int, topk: int, population: int, spare: int, seed: int
) -> None:
    host_slots, capacity = selections(rows, topk, population, seed), topk + spare
    pieces = plan_pieces(host_slots, capacity, population, population)
    covered = [row for piece in pieces for row in range(piece.rows.start, piece.rows.stop)]
    assert covered == list(range(rows))
    step = capacity // topk
    for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
        distinct = len(chosen(host_slots, piece.rows))
        assert distinct <= piece.distinct <= capacity
        if len(pieces) > 1:
            assert distinct == piece.distinct
        if following is not None:
            longer = slice(piece.rows.start, piece.rows.stop + step)
            assert len(chosen(host_slots, longer)) > capacity


@pytest.mark.parametrize("step", [1, 3, 8])
def test_fresh_rows_of_a_block_are_those_no_block_since_has(step: int) -> None:
    host_slots = selections(20, 6, 25, seed=step)
    fresh = fresh_rows(host_slots, step)
    blocks = [chosen(host_slots, slice(at, at + step)) for at in range(0, 20, step)]
    assert fresh.shape == (len(blocks), len(blocks))
    for number, block in enumerate(blocks):
        for start in range(number + 1):
            since: set[int] = set().union(*blocks[start:number])
            assert fresh[number, start] == len(block - since)


def test_rows_that_select_alike_stay_together() -> None:
    same = torch.arange(8, dtype=torch.int32).expand(1000, 8)
    assert [piece.rows for piece in plan_pieces(same, 8, 2**40, 8)] == [slice(0, 1000)]
    other = torch.arange(8000, dtype=torch.int32).view(1000, 8)
    assert len(plan_pieces(other, 8, 2**40, 8000)) == 1000


@pytest.mark.parametrize("rows, context_rows, waits", [(1, 2**40, 0), (9, 24, 0), (9, 2**40, 1)])
def test_counting_distinct_rows_waits_once(rows: int, context_rows: int, waits: int) -> None:
    """And not at all where what a pass may select is known to fit."""
    host_slots = selections(rows, 8, 24, seed=3)
    host_slots[-1, -1] = 23  # the last host slot of the pool
    with Waits() as counted:
        (piece,) = plan_pieces(host_slots, 24, context_rows, 24)
    assert counted.number == waits
    assert len(chosen(host_slots, slice(0, rows))) <= piece.distinct <= 24


def test_slots_of_a_large_pool_are_told_apart() -> None:
    """Pairs of slot and block need more than 32 bits."""
    last = 2**31 - 1
    host_slots = torch.full((3000, 4), last, dtype=torch.int32)
    host_slots[::2] = last - 1
    fresh = fresh_rows(host_slots, 3)
    assert (fresh.diagonal() == 2).all() and not fresh[1:, 0].any()
