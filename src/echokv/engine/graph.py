"""The decode step as CUDA graphs: one for each batch size and bound on the context length.

A graph reads fixed buffers, which `DecodeInputs` fills, and leaves its sampled tokens in one,
where the next step finds them; nothing in it waits for the CPU or depends in shape on what the
buffers hold. Rows past the batch are padding: they select nothing and write nothing, but cost
what a row costs, so sizes are spaced closely.

The step takes the most likely tokens. Where a row is drawn otherwise, a second graph, of the
logits alone, is replayed behind it: so ways of drawing don't multiply the graphs of the model.
"""

import bisect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from echokv.attention.context import ForwardContext
from echokv.engine.decode_inputs import DecodeInputs
from echokv.engine.draw import Described, Method, draw
from echokv.engine.scheduler import ScheduledRequest
from echokv.kernels.protocol import Kernels
from echokv.log import progress
from echokv.models.deepseek_v32 import DeepseekV32

SMALLEST_CONTEXT = 8192
"""Tokens; below it a tighter bound on the score width saves nothing that can be measured."""

GraphShapes = tuple[Sequence[int], Sequence[int]]
"""Batch sizes and bounds on the context length, both ascending; every pair is captured."""


class DecodeGraphs:
    """Every captured decode step of one engine; captures at construction, with progress.

    Args:
        model: the loaded model, whose decode pass never waits for the device.
        context: what it calls; an observer would only be called while capturing, so it has none.
        kernels: the backend, for drawing.
        max_model_len: longest context, tokens.
        tokens: [most requests of a step] int64 on a CUDA device: what the step before sampled, and
            after this step what this one did.
        shapes: what to capture instead of `batch_sizes` by `context_bounds`; the last bound must
            be max_model_len.
    """

    def __init__(
        self,
        model: DeepseekV32,
        context: ForwardContext,
        kernels: Kernels,
        *,
        max_model_len: int,
        tokens: Tensor,
        shapes: GraphShapes | None = None,
    ) -> None:
        assert context.observer is None, "an observer doesn't see what a graph selects"
        self._model = model
        self._context = context
        self._kernels = kernels
        self._tokens = tokens
        max_requests = tokens.shape[0]
        default = (batch_sizes(max_requests), context_bounds(max_model_len))
        self._sizes, self._contexts = shapes or default
        assert self._contexts[-1] == max_model_len, "a context would be longer than any bound"
        self._inputs = DecodeInputs(max_requests, max_model_len, tokens.device, tokens)
        self.logits = torch.zeros(
            (max_requests, model.config.vocab_size), dtype=torch.float32, device=tokens.device
        )
        self._pool = torch.cuda.graph_pool_handle()
        # The largest first: the others then fit into the memory that it took.
        pairs = [(size, bound) for size in self._sizes for bound in self._contexts][::-1]
        ways = [(size, way) for size in self._sizes for way in Method if way][::-1]
        captures = progress(
            [*pairs, *ways],
            total=len(pairs) + len(ways),
            what="capturing graphs",
            unit="graph",
        )
        self._steps: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._draws: dict[tuple[int, Method], torch.cuda.CUDAGraph] = {}
        for size, key in captures:
            if isinstance(key, Method):
                self._draws[size, key] = self._capture(self._draw, size, key)
            else:
                self._steps[size, key] = self._capture(self._step, size, key)

    def covers(self, items: Sequence[ScheduledRequest]) -> bool:
        """Whether a step is one token a request, and not too many of them."""
        return len(items) <= self._sizes[-1] and all(item.count == 1 for item in items)

    def run(
        self, items: Sequence[ScheduledRequest], described: Sequence[Described], method: Method
    ) -> None:
        """Enqueue a step that is covered; never waits for the device.

        Leaves row i's logits in `logits[i]` and its token in `tokens[i]`, both until the next
        step.

        Args:
            items: the step.
            described: how each row is drawn; not read by Method.GREEDY.
            method: at least what the rows need.
        """
        self._inputs.fill(items, described)
        size = self._sizes[bisect.bisect_left(self._sizes, len(items))]
        longest = 1 + max(item.start for item in items)
        bound = self._contexts[bisect.bisect_left(self._contexts, longest)]
        self._steps[size, bound].replay()
        if method is not Method.GREEDY:
            self._draws[size, method].replay()

    @torch.inference_mode()
    def _capture(
        self, run: Callable[..., None], size: int, key: int | Method
    ) -> torch.cuda.CUDAGraph:
        """Capture with padding in every row, after a run that compiles and allocates."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(size, key)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run(size, key)
        return graph

    def _step(self, size: int, max_context_len: int) -> None:
        batch = self._inputs.batch(size, max_context_len)
        hidden = self._model(batch, self._context)
        self.logits[:size] = self._model.compute_logits(hidden)
        self._tokens[:size] = self.logits[:size].argmax(dim=-1)

    def _draw(self, size: int, method: Method) -> None:
        self._tokens[:size] = draw(
            self.logits[:size], self._inputs.draws(size), method, self._kernels
        )


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
