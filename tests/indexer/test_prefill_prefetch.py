"""Prefill's prefetch: how much may move, and what shifts are learnt."""

from dataclasses import replace

import pytest
import torch
from tests.kernels.cuda_emulator import COMPILER, emulated_kernels

from echokv.cache.batch import Chunks, ForwardBatch
from echokv.cache.manager import CacheManager
from echokv.indexer.prefill_prefetch import PrefillPrefetcher
from echokv.indexer.threshold import Predictions
from echokv.kernels.registry import load_kernels
from echokv.memory.pools import DevicePool, HostPool
from echokv.memory.slots import HostSlots

CPU = torch.device("cpu")
TOPK, CAPACITY, NAN = 8, 100, float("nan")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def batch_of(counts: list[int], context_rows: int) -> ForwardBatch:
    tokens = sum(counts)
    zeros = torch.zeros(tokens, dtype=torch.int32)
    ends = torch.tensor(counts).cumsum(0)
    return ForwardBatch(
        token_ids=zeros.long(), positions=zeros, context_lens=zeros, host_slots=HostSlots(zeros),
        request_rows=zeros, request_slots=None, block_tables=zeros[: len(counts), None],
        sampled_rows=zeros[:0].long(), max_context_len=context_rows, num_context_rows=context_rows,
        num_real_tokens=tokens,
        chunks=Chunks(request_slots=torch.arange(len(counts)) + 1, last_rows=ends - 1),
    )  # fmt: skip


def prefetcher(*, fused: bool = True) -> tuple[PrefillPrefetcher, Predictions, CacheManager]:
    kernels = emulated_kernels() if fused else load_kernels("reference", CPU)
    cache = CacheManager(kernels, HostPool(3, 256, 16, CPU), DevicePool(3, CAPACITY, 16, CPU))
    predictions = Predictions.create(2, 4, CPU)
    made = PrefillPrefetcher(kernels.fused_prefetch, cache, predictions, (0, 2), TOPK)
    return made, predictions, cache


@pytest.mark.parametrize(
    ("tokens", "context_rows", "rows"),
    [
        (40, 100, 100),  # all contexts fit, and so does whatever is fetched
        (40, 60, 60),
        (40, 101, 0),  # the pass doesn't fit: it reads copies
        (11, 500, 1),
        (5, 500, 55),
        (2, 90, 90),
    ],
)
def test_what_is_fetched_leaves_room_for_the_pass(
    tokens: int, context_rows: int, rows: int
) -> None:
    made, _, _ = prefetcher()
    batch = batch_of([tokens - 1, 1], context_rows)
    assert made.rows_ahead(batch) == rows
    assert made.rows_ahead(replace(batch, chunks=None)) == 0
    assert prefetcher(fused=False)[0].rows_ahead(batch) == 0


def learn(
    made: PrefillPrefetcher, cache: CacheManager, batch: ForwardBatch, kth: list[list[float]]
) -> None:
    """One pass, whose requests' last tokens have these k-th scores, by index layer."""
    assert batch.chunks is not None
    made.begin_pass(batch)
    for row in kth:
        scores = torch.full((batch.num_tokens,), 99.0)
        scores[batch.chunks.last_rows] = torch.tensor(row)
        made.learn(scores, batch)
    cache.end_step()


def test_shifts_follow_the_last_tokens() -> None:
    made, predictions, cache = prefetcher()
    expected = torch.full((2, 5), NAN)
    batch = batch_of([5, 1], 50)
    learn(made, cache, batch, [[2.0, 4.0], [-1.0, -torch.inf]])  # few tokens: none
    expected[0, 1:3] = torch.tensor([2.0, 4.0])
    expected[1, 1] = -1.0
    expected[:, 4] = torch.tensor([4.0, NAN])  # the last request's, where it has one
    torch.testing.assert_close(predictions.shifts, expected, equal_nan=True)
    learn(made, cache, batch, [[3.0, 4.0], [-2.0, 8.0]])
    expected[0, 1:3] = torch.tensor([2.5, 4.0])
    expected[1, 1:3] = torch.tensor([-1.5, 8.0])
    expected[:, 4] = torch.tensor([4.0, 8.0])
    torch.testing.assert_close(predictions.shifts, expected, equal_nan=True)
    predictions.forget([1, 3])  # whoever begins takes over what anybody had last
    expected[:, [1, 3]] = expected[:, 4:]
    torch.testing.assert_close(predictions.shifts, expected, equal_nan=True)


def test_a_pass_that_does_not_fit_learns_nothing() -> None:
    made, predictions, cache = prefetcher()
    learn(made, cache, batch_of([40], 200), [[1.0], [1.0]])
    assert predictions.shifts.isnan().all()
