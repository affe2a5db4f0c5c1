"""From scheduled tokens to sampled ones: builds forward passes, runs the model, samples.

A step is one or more passes. On the reference backend every pass has exactly `token_tile` rows
(the last ones padding), so that a token's result is the same bits whatever shares its step; on
GPU backends a step is one pass, or the replay of a captured decode step.

Sampled tokens stay on the device for the next step, which may be launched before the CPU knows
them.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from echokv.attention.context import ForwardContext
from echokv.cache.batch import Chunks, ForwardBatch
from echokv.engine.draw import Method
from echokv.engine.graph import DecodeGraphs
from echokv.engine.in_flight import StepInFlight
from echokv.engine.inputs import PassInputs
from echokv.engine.request import Request
from echokv.engine.sampler import Draws, Sampler
from echokv.engine.scheduler import ScheduledRequest
from echokv.memory.slots import HostSlots
from echokv.models.deepseek_v32 import DeepseekV32


class ModelRunner:
    """Runs steps of the model.

    Args:
        model: the loaded model.
        context: the indexer and attention that the model calls, with their pools.
        sampler: draws the tokens.
        token_tile: rows of every pass, or None for passes of any size.
        tokens: [most sampled rows of a step] int64, where the model runs: the samples of the last
            step, which the graphs read and write too.
        graphs: captured decode steps; None runs every step eagerly.
    """

    def __init__(
        self,
        model: DeepseekV32,
        context: ForwardContext,
        sampler: Sampler,
        *,
        token_tile: int | None,
        tokens: Tensor,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model = model
        self._context = context
        self._sampler = sampler
        self._token_tile = token_tile
        self._tokens = tokens
        self._graphs = graphs

    @torch.inference_mode()
    def launch(self, scheduled: list[ScheduledRequest]) -> StepInFlight:
        """Enqueue a step; where a request's last token is pending, the step before sampled it.

        Returns:
            the tokens sampled after the last scheduled token of each request whose `samples` is
            true, in the order of `scheduled`. Their `pending_row` says where they will be.
        """
        graphs = self._graphs
        if graphs is not None and graphs.covers(scheduled):
            return self._replay(graphs, scheduled)
        rows = self._token_tile or sum(item.count for item in scheduled)
        passes = split_into_passes(scheduled, rows)
        hidden = [
            self._model.forward(batch, self._context)[batch.sampled_rows]
            for batch in (self._build(one) for one in passes)
        ]
        logits = self._logits(torch.cat(hidden))
        return self._sample(logits, [item.request for item in scheduled if item.samples])

    def _replay(self, graphs: DecodeGraphs, scheduled: list[ScheduledRequest]) -> StepInFlight:
        """A captured step; what it can't draw is sampled from the logits that it leaves."""
        rows = [row for row, item in enumerate(scheduled) if item.samples]
        requests = [scheduled[row].request for row in rows]
        method = self._sampler.captured_method(requests)
        drawn = method is not None and method is not Method.GREEDY
        described = [self._sampler.describe(item.request) for item in scheduled] if drawn else []
        graphs.run(scheduled, described, method or Method.GREEDY)
        if method is None:
            return self._sample(graphs.logits[self._tensor(rows, torch.int64)], requests)
        for row, request in zip(rows, requests, strict=True):
            request.pending_row = row
        return StepInFlight(
            requests, rows, Draws(token_ids=self._tokens[: len(scheduled)], reports=[])
        )

    def _sample(self, logits: Tensor, requests: list[Request]) -> StepInFlight:
        draws = self._sampler.sample(logits, requests)
        self._tokens[: len(requests)] = draws.token_ids
        for row, request in enumerate(requests):
            request.pending_row = row
        return StepInFlight(requests, list(range(len(requests))), draws)

    def _build(self, items: list[ScheduledRequest]) -> ForwardBatch:
        rows = self._token_tile or sum(item.count for item in items)
        inputs = PassInputs.gather(items, rows)
        is_decode = all(item.count == 1 for item in items)
        return ForwardBatch(
            token_ids=self._token_ids(inputs),
            positions=self._tensor(inputs.positions, torch.int32),
            context_lens=self._tensor(inputs.context_lens, torch.int32),
            host_slots=HostSlots(self._tensor(inputs.host_slots, torch.int32)),
            request_rows=self._tensor(inputs.request_rows, torch.int32),
            request_slots=self._tensor(inputs.request_slots, torch.int32) if is_decode else None,
            block_tables=self._tensor(inputs.padded_tables(), torch.int32),
            sampled_rows=self._tensor(inputs.sampled_rows, torch.int64),
            max_context_len=max(inputs.context_lens),
            num_context_rows=inputs.num_context_rows,
            num_real_tokens=inputs.num_real_tokens,
            chunks=None if is_decode else self._chunks(items),
        )

    def _chunks(self, items: list[ScheduledRequest]) -> Chunks:
        ends = itertools.accumulate(item.count for item in items)
        slots, last = self._tensor(
            [[item.request.request_slot for item in items], [end - 1 for end in ends]], torch.int64
        )
        return Chunks(request_slots=slots, last_rows=last)

    def _logits(self, hidden: Tensor) -> Tensor:
        """LM head over sampled rows, in tiles where the backend has them."""
        if hidden.shape[0] == 0 or self._token_tile is None:
            return self._model.compute_logits(hidden)
        tiles = []
        for start in range(0, hidden.shape[0], self._token_tile):
            tile = hidden[start : start + self._token_tile]
            padding = self._token_tile - tile.shape[0]
            padded = torch.nn.functional.pad(tile, (0, 0, 0, padding))
            tiles.append(self._model.compute_logits(padded)[: tile.shape[0]])
        return torch.cat(tiles)

    def _token_ids(self, inputs: PassInputs) -> Tensor:
        token_ids = self._tensor(inputs.token_ids, torch.int64)
        if inputs.pending:
            rows, sources = self._tensor(list(zip(*inputs.pending, strict=True)), torch.int64)
            token_ids[rows] = self._tokens[sources]
        return token_ids

    def _tensor(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        device = self._tokens.device
        staged = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
        return staged.to(device, non_blocking=True)


def split_into_passes(
    scheduled: list[ScheduledRequest], max_rows: int
) -> list[list[ScheduledRequest]]:
    """Cut a step into passes of at most max_rows tokens, keeping the order of tokens.

    A request that is cut samples only in the pass that holds its last scheduled token.
    """
    passes: list[list[ScheduledRequest]] = []
    room = 0
    for item in scheduled:
        start, end = item.start, item.start + item.count
        while start < end:
            if room == 0:
                passes.append([])
                room = max_rows
            count = min(end - start, room)
            passes[-1].append(ScheduledRequest(request=item.request, start=start, count=count))
            start += count
            room -= count
    return passes
