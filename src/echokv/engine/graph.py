"""The decode step as CUDA graphs: one for each batch size and bound on the context length.

A graph reads fixed buffers, which `DecodeInputs` fills, and is replayed; nothing in it waits for
the CPU or depends in shape on what the buffers hold. Rows past the batch are padding: they select
nothing and write nothing, but cost what a row costs, so sizes are spaced closely.
"""

import bisect
from collections.abc import Sequence

import torch
from torch import Tensor

from echokv.attention.context import ForwardContext
from echokv.cache.batch import ForwardBatch
from echokv.engine.inputs import PassInputs
from echokv.engine.scheduler import ScheduledRequest
from echokv.log import progress
from echokv.memory.slots import NO_SLOT, HostSlots, blocks_for
from echokv.models.deepseek_v32 import DeepseekV32

SMALLEST_CONTEXT = 8192
"""Tokens; below it a tighter bound on the score width saves nothing that can be measured."""

GraphShapes = tuple[Sequence[int], Sequence[int]]
"""Batch sizes and bounds on the context length, both ascending; every pair is captured."""

_COLUMNS = ("positions", "context_lens", "host_slots")


class DecodeInputs:
    """The buffers that captured graphs read, and the pinned ones that they are filled from.

    Args:
        max_requests: most rows of a graph.
        max_model_len: tokens; bounds the block tables.
        device: where the model runs.
    """

    def __init__(self, max_requests: int, max_model_len: int, device: torch.device) -> None:
        pin = device.type == "cuda"
        blocks = blocks_for(max_model_len)
        self._tokens_staged = torch.zeros(max_requests, dtype=torch.int64, pin_memory=pin)
        self._staged = torch.zeros((len(_COLUMNS), max_requests), dtype=torch.int32, pin_memory=pin)
        self._tables_staged = torch.full(
            (max_requests, blocks), NO_SLOT, dtype=torch.int32, pin_memory=pin
        )
        self._tokens = torch.zeros(max_requests, dtype=torch.int64, device=device)
        self._columns = torch.zeros_like(self._staged, device=device)
        self._tables = torch.full_like(self._tables_staged, NO_SLOT, device=device)
        self._rows = torch.arange(max_requests, dtype=torch.int32, device=device)
        self._clear()
        self._columns.copy_(self._staged)

    def fill(self, inputs: PassInputs) -> None:
        """Copy one pass of one token a request into the buffers; the rest becomes padding."""
        self._clear()
        real = inputs.num_real_tokens
        self._tokens_staged[:real] = torch.tensor(inputs.token_ids[:real])
        for column, name in zip(self._staged, _COLUMNS, strict=True):
            column[:real] = torch.tensor(getattr(inputs, name)[:real])
        for row, table in zip(self._tables_staged, inputs.block_tables, strict=False):
            row[: len(table)] = torch.tensor(table)
        self._tokens.copy_(self._tokens_staged, non_blocking=True)
        self._columns.copy_(self._staged, non_blocking=True)
        self._tables[:real].copy_(self._tables_staged[:real], non_blocking=True)

    def batch(self, rows: int, max_context_len: int) -> ForwardBatch:
        """The first rows of the buffers as a pass; no row counts as padding to the model."""
        positions, context_lens, host_slots = (column[:rows] for column in self._columns)
        return ForwardBatch(
            token_ids=self._tokens[:rows],
            positions=positions,
            context_lens=context_lens,
            host_slots=HostSlots(host_slots),
            request_rows=self._rows[:rows],
            block_tables=self._tables[:rows],
            sampled_rows=self._rows[:rows].long(),
            max_context_len=max_context_len,
            num_context_rows=rows * max_context_len,
            num_real_tokens=rows,
        )

    def _clear(self) -> None:
        self._tokens_staged.zero_()
        self._staged.zero_()
        self._staged[_COLUMNS.index("host_slots")] = NO_SLOT


class DecodeGraphs:
    """Every captured decode step of one engine; captures at construction, with progress.

    Args:
        model: the loaded model, whose decode pass never waits for the device.
        context: what it calls; an observer would only be called while capturing, so it has none.
        max_requests: most requests of a step.
        max_model_len: longest context, tokens.
        device: a CUDA device.
        shapes: what to capture instead of `batch_sizes` by `context_bounds`; the last bound must
            be max_model_len.
    """

    def __init__(
        self,
        model: DeepseekV32,
        context: ForwardContext,
        *,
        max_requests: int,
        max_model_len: int,
        device: torch.device,
        shapes: GraphShapes | None = None,
    ) -> None:
        assert context.observer is None, "an observer doesn't see what a graph selects"
        self._model = model
        self._context = context
        default = (batch_sizes(max_requests), context_bounds(max_model_len))
        self._sizes, self._contexts = shapes or default
        assert self._contexts[-1] == max_model_len, "a context would be longer than any bound"
        self._inputs = DecodeInputs(self._sizes[-1], max_model_len, device)
        self._pool = torch.cuda.graph_pool_handle()
        pairs = [(size, bound) for size in self._sizes for bound in self._contexts]
        self._graphs = {
            shape: self._capture(*shape)
            # The largest first: the others then fit into the memory that it took.
            for shape in progress(
                reversed(pairs), total=len(pairs), what="capturing graphs", unit="graph"
            )
        }

    def covers(self, items: list[ScheduledRequest]) -> bool:
        """Whether a step is one token a request, and not too many of them."""
        return len(items) <= self._sizes[-1] and all(item.count == 1 for item in items)

    def run(self, items: list[ScheduledRequest]) -> Tensor:
        """Logits [len(items), vocab] float32 of a step that is covered; valid until the next."""
        inputs = PassInputs.gather(items, len(items))
        self._inputs.fill(inputs)
        size = self._sizes[bisect.bisect_left(self._sizes, len(items))]
        longest = max(inputs.context_lens)
        bound = self._contexts[bisect.bisect_left(self._contexts, longest)]
        graph, logits = self._graphs[size, bound]
        graph.replay()
        return logits[inputs.sampled_rows]

    def _capture(self, size: int, max_context_len: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture with padding in every row, after a run that compiles and allocates."""
        batch = self._inputs.batch(size, max_context_len)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(batch)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._step(batch)
        return graph, logits

    @torch.inference_mode()
    def _step(self, batch: ForwardBatch) -> Tensor:
        return self._model.compute_logits(self._model(batch, self._context))


def batch_sizes(max_requests: int) -> list[int]:
    """1, 2, 4, then multiples of 8, and max_requests itself (vLLM's spacing)."""
    sizes = {1, 2, 4, *range(8, max_requests, 8), max_requests}
    return sorted(size for size in sizes if size <= max_requests)


def context_bounds(max_model_len: int) -> list[int]:
    """Bounds on the context length, four times apart, the last one max_model_len."""
    bounds = []
    bound = SMALLEST_CONTEXT
    while bound < max_model_len:
        bounds.append(bound)
        bound *= 4
    return [*bounds, max_model_len]
