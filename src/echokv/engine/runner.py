"""From scheduled tokens to logits: builds forward passes, runs the model, gathers sampled rows.

A step is one or more passes. On the reference backend every pass has exactly `token_tile` rows
(the last ones padding), so that a token's result is the same bits whatever shares its step; on
GPU backends a step is one pass, or the replay of a captured decode step.
"""

import torch
from torch import Tensor

from echokv.attention.context import ForwardContext
from echokv.cache.batch import ForwardBatch
from echokv.engine.graph import DecodeGraphs
from echokv.engine.inputs import PassInputs
from echokv.engine.scheduler import ScheduledRequest
from echokv.memory.slots import HostSlots
from echokv.models.deepseek_v32 import DeepseekV32


class ModelRunner:
    """Runs steps of the model.

    Args:
        model: the loaded model.
        context: the indexer and attention that the model calls, with their pools.
        token_tile: rows of every pass, or None for passes of any size.
        device: where the model runs.
        graphs: captured decode steps; None runs every step eagerly.
    """

    def __init__(
        self,
        model: DeepseekV32,
        context: ForwardContext,
        *,
        token_tile: int | None,
        device: torch.device,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model = model
        self._context = context
        self._token_tile = token_tile
        self._device = device
        self._graphs = graphs

    @torch.inference_mode()
    def execute(self, scheduled: list[ScheduledRequest]) -> Tensor:
        """Compute all scheduled tokens.

        Returns:
            [S, vocab] float32 logits of the last token of each request whose `samples` is true,
            in the order of `scheduled`.
        """
        if self._graphs is not None and self._graphs.covers(scheduled):
            return self._graphs.run(scheduled)
        rows = self._token_tile or sum(item.count for item in scheduled)
        passes = split_into_passes(scheduled, rows)
        hidden = [
            self._model.forward(batch, self._context)[batch.sampled_rows]
            for batch in (self._build(one) for one in passes)
        ]
        return self._logits(torch.cat(hidden))

    def _build(self, items: list[ScheduledRequest]) -> ForwardBatch:
        rows = self._token_tile or sum(item.count for item in items)
        inputs = PassInputs.gather(items, rows)
        return ForwardBatch(
            token_ids=self._tensor(inputs.token_ids, torch.int64),
            positions=self._tensor(inputs.positions, torch.int32),
            context_lens=self._tensor(inputs.context_lens, torch.int32),
            host_slots=HostSlots(self._tensor(inputs.host_slots, torch.int32)),
            request_rows=self._tensor(inputs.request_rows, torch.int32),
            request_slots=self._tensor(inputs.request_slots, torch.int32)
            if all(item.count == 1 for item in items)
            else None,
            block_tables=self._tensor(inputs.padded_tables(), torch.int32),
            sampled_rows=self._tensor(inputs.sampled_rows, torch.int64),
            max_context_len=max(inputs.context_lens),
            num_context_rows=inputs.num_context_rows,
            num_real_tokens=inputs.num_real_tokens,
        )

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

    def _tensor(self, values: list[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device, non_blocking=True)


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
