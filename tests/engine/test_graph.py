"""Inputs of captured decode steps: the buffers hold what an eager pass would, padding apart."""

import pytest
import torch

from echokv.engine.graph import DecodeInputs, batch_sizes, context_bounds
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


def test_buffers_forget_the_previous_step() -> None:
    buffers = DecodeInputs(4, 200, torch.device("cpu"))
    long = [decoding("a", 130, [5, 6, 3]), decoding("b", 3, [1]), decoding("c", 64, [8])]
    buffers.fill(PassInputs.gather(long, 3))
    buffers.fill(PassInputs.gather([decoding("d", 65, [2, 0])], 1))
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
    buffers = DecodeInputs(2, 64, torch.device("cpu"))
    batch = buffers.batch(2, 64)
    assert batch.host_slots.tolist() == [-1, -1]
    buffers.fill(PassInputs.gather([decoding("a", 3, [1]), decoding("b", 5, [0])], 2))
    assert batch.host_slots.tolist() == [66, 4]


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
