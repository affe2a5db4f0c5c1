"""A decode step alone on the device: the same pass captured and replayed, no engine around it.

What is left of a step when scheduling, input buffers and sampling cost nothing: the floor of the
engine's own step time, and what a profiler should look at.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from echokv.attention.context import ForwardContext
from echokv.attention.sparse_mla import SparseAttention
from echokv.bench.decode_engine import DecodeEngine
from echokv.bench.decode_replay import ReplaySelector
from echokv.cache.batch import ForwardBatch
from echokv.cache.side_stream import SideStream
from echokv.engine.inputs import PassInputs
from echokv.engine.request import Request
from echokv.engine.scheduler import ScheduledRequest
from echokv.memory.slots import HostSlots


class DeviceStep:
    """The last step of an engine's running requests, ready to be replayed.

    Inputs never change; replayed selections still advance, real ones stay what they are. New rows
    overwrite each other.

    Args:
        decode: an engine with running requests that have decoded.
    """

    def __init__(self, decode: DecodeEngine) -> None:
        loaded, engine = decode.loaded, decode.engine
        self._model = loaded.model
        self._selector = decode.selector
        self._context = ForwardContext(
            decode.selector,
            SparseAttention(
                loaded.kernels,
                engine.cache,
                loaded.row_format,
                loaded.config.softmax_scale,
                loaded.config.index_topk,
            ),
            beside=SideStream(loaded.device, urgent=False),
        )
        items = [
            ScheduledRequest(request=one, start=_last_known(one), count=1)
            for one in engine.scheduler.running
        ]
        self._batch = _batch(items, loaded.device, loaded.kernels.token_tile)
        self.run: Callable[[], None] = self._run_once
        if loaded.device.type == "cuda":
            self.run = self._captured()

    @torch.inference_mode()
    def _run_once(self) -> None:
        hidden = self._model.forward(self._batch, self._context)
        self._model.compute_logits(hidden).argmax(dim=-1)
        if isinstance(self._selector, ReplaySelector):
            self._selector.offset.add_(1)

    def _captured(self) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run_once()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._run_once()
        return self._graph.replay


def _last_known(request: Request) -> int:
    """Position of the last token that is computed and known; a step in flight may be ahead."""
    return min(request.num_computed_tokens, request.num_tokens) - 1


def _batch(items: list[ScheduledRequest], device: torch.device, tile: int | None) -> ForwardBatch:
    inputs = PassInputs.gather(items, tile or len(items))

    def tensor(values: list[int] | list[list[int]], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return ForwardBatch(
        token_ids=tensor(inputs.token_ids, torch.int64),
        positions=tensor(inputs.positions),
        context_lens=tensor(inputs.context_lens),
        host_slots=HostSlots(tensor(inputs.host_slots)),
        request_rows=tensor(inputs.request_rows),
        request_slots=tensor(inputs.request_slots),
        block_tables=tensor(inputs.padded_tables()),
        sampled_rows=tensor(inputs.sampled_rows, torch.int64),
        max_context_len=max(inputs.context_lens),
        num_context_rows=inputs.num_context_rows,
        num_real_tokens=inputs.num_real_tokens,
    )


def record_kernels(run: Callable[[], object], steps: int) -> profile:
    """What the GPU did in some steps.

    Args:
        run: one step.
        steps: how many.
    """
    recorded = profile(activities=[ProfilerActivity.CUDA])
    with recorded:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    return recorded


def kernel_times(run: Callable[[], None], steps: int) -> list[tuple[str, float, float]]:
    """Where a step's time on the GPU goes, by kernel: (name, us a step, launches a step).

    Args:
        run: one step.
        steps: how many to average over.
    """
    totals = [
        (event.key, event.self_device_time_total / steps, event.count / steps)
        for event in record_kernels(run, steps).key_averages()
    ]
    return sorted((one for one in totals if one[1] > 0), key=lambda one: -one[1])
