"""Inputs of captured decode steps: the buffers hold what an eager pass would, padding apart."""

import random

import pytest
import torch

from echokv.engine.decode_inputs import DecodeInputs
from echokv.engine.draw import GREEDY
from echokv.engine.graph import batch_sizes, context_bounds
from echokv.engine.inputs import PassInputs
from echokv.engine.request import Request
from echokv.engine.sampling_params import SamplingParams
from echokv.engine.scheduler import ScheduledRequest


def decoding(name: str, num_tokens: int, blocks: list[int]) -> ScheduledRequest:
    tokens = [100 + index for index in range(num_tokens)]
    request = Request(name, tokens, SamplingParams(), max_total_tokens=1000, seed=0)
    request.block_ids = blocks
    return ScheduledRequest(request=request, start=num_tokens - 1, count=1)


def test_a_pass_is_laid_out_request_by_request() -> None:
    prefill = decoding("prefill", 70, [4, 2])
    items = [
        ScheduledRequest(request=prefill.request, start=62, count=4),
        decoding("decode", 65, [7, 9]),
    ]
    inputs = PassInputs.gather(items, 8)
    assert inputs.token_ids == [162, 163, 164, 165, 164, 0, 0, 0]
    assert inputs.positions == [62, 63, 64, 65, 64, 0, 0, 0]
    assert inputs.context_lens == [63, 64, 65, 66, 65, 0, 0, 0]
    assert inputs.host_slots == [4 * 64 + 62, 4 * 64 + 63, 128, 129, 9 * 64, -1, -1, -1]
    assert inputs.request_rows == [0, 0, 0, 0, 1, 0, 0, 0]
    assert inputs.sampled_rows == [4]
    assert inputs.num_real_tokens == 5


def make_inputs(rows: int, max_model_len: int) -> tuple[DecodeInputs, torch.Tensor]:
    tokens = torch.arange(1000, 1000 + rows)
    return DecodeInputs(rows, max_model_len, torch.device("cpu"), tokens), tokens


def test_buffers_forget_the_previous_step() -> None:
    buffers, _ = make_inputs(4, 200)
    long = [decoding("a", 130, [5, 6, 3]), decoding("b", 3, [1]), decoding("c", 64, [8])]
    buffers.fill(long, [])
    buffers.fill([decoding("d", 65, [2, 0])], [])
    batch = buffers.batch(3, 200)
    assert batch.token_ids.tolist() == [164, 0, 0]
    assert batch.positions.tolist() == [64, 0, 0]
    assert batch.context_lens.tolist() == [65, 0, 0]
    assert batch.host_slots.tolist() == [0, -1, -1]
    assert batch.request_rows.tolist() == [0, 1, 2]
    assert batch.block_tables.shape == (3, 4)
    assert batch.block_tables[0, :2].tolist() == [2, 0]
    assert batch.num_real_tokens == 3 and batch.max_context_len == 200


def test_a_batch_views_the_buffers_that_fill_writes() -> None:
    buffers, _ = make_inputs(2, 64)
    batch = buffers.batch(2, 64)
    assert batch.host_slots.tolist() == [-1, -1]
    buffers.fill([decoding("a", 3, [1]), decoding("b", 5, [0])], [])
    assert batch.host_slots.tolist() == [66, 4]


def test_a_pending_token_is_taken_from_the_row_that_sampled_it() -> None:
    buffers, tokens = make_inputs(3, 200)
    known, pending = decoding("known", 3, [1]), decoding("pending", 5, [0])
    pending.request.token_ids.pop()
    pending.request.num_pending_tokens = 1
    pending.request.pending_row = 2
    buffers.fill([known, pending], [])
    assert buffers.batch(3, 200).token_ids.tolist() == [102, 1002, 0]
    tokens += 50
    assert buffers.batch(3, 200).token_ids.tolist() == [102, 1052, 0]
    inputs = PassInputs.gather([known, pending], 4)
    assert inputs.token_ids == [102, 0, 0, 0] and inputs.pending == [(1, 2)]


def test_tables_follow_growth_and_changes_of_rows() -> None:
    """Against the block ids themselves, through many steps of a random load."""
    rng = random.Random(0)
    buffers, _ = make_inputs(5, 64 * 9)
    requests = [decoding(str(index), 1, [rng.randrange(100)]) for index in range(8)]
    batch = requests[:3]
    for _ in range(200):
        batch = rng.sample(requests, rng.randint(1, 5)) if rng.random() < 0.3 else batch
        for item in batch:
            table = item.request.block_ids
            if rng.random() < 0.3 and len(table) < 9:
                table += [rng.randrange(100)]  # the same list, as `Scheduler` grows it
            if rng.random() < 0.1:
                item.request.block_ids = [rng.randrange(100)]
        buffers.fill(batch, [])
        tables = buffers.batch(5, 64 * 9).block_tables
        for row, item in enumerate(batch):
            assert tables[row, : len(item.request.block_ids)].tolist() == item.request.block_ids


def test_draws_are_staged_and_forgotten() -> None:
    buffers, _ = make_inputs(3, 64)
    items = [decoding("a", 3, [1]), decoding("b", 5, [0])]
    drawn = (0.7, 5.0, 0.9, 0.1, 0.25)
    buffers.fill(items, [(GREEDY, [4, 9]), (drawn, [])])
    draws = buffers.draws(3)
    assert draws.numbers.T.tolist() == [list(GREEDY), list(drawn), list(GREEDY)]
    assert draws.ends.tolist() == [[4, 9, *[-1] * 6], [-1] * 8, [-1] * 8]
    buffers.fill(items, [])
    assert draws.numbers.T.tolist() == [list(GREEDY)] * 3
    assert draws.ends.tolist() == [[-1] * 8] * 3


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])],
)
def test_batch_sizes_end_at_the_most(most: int, sizes: list[int]) -> None:
    assert batch_sizes(most) == sizes


@pytest.mark.parametrize(
    ("length", "bounds"),
    [(100, [100]), (8192, [8192]), (8193, [8192, 8193]), (163840, [8192, 32768, 131072, 163840])],
)
def test_context_bounds_end_at_the_longest(length: int, bounds: list[int]) -> None:
    assert context_bounds(length) == bounds
