"""One HTTP request as one or more engine requests that run side by side.

Cancelling or closing what `run_all` returns aborts every one of them in the engine.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from echokv.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from echokv.engine.sampling_params import SamplingParams
from echokv.server.metrics import RequestObserver, ServerMetrics
from echokv.server.responses import PromptTokensDetails, Usage
from echokv.server.serving_engine import ServingEngine


@dataclass(frozen=True, kw_only=True)
class SubRequest:
    """One prompt of an HTTP request."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams


IndexedOutputs = AsyncGenerator[tuple[int, RequestOutput], None]

_Queue = asyncio.Queue[tuple[int, RequestOutput | Exception]]


async def run_all(
    engine: ServingEngine, metrics: ServerMetrics, subrequests: Sequence[SubRequest]
) -> IndexedOutputs:
    """Yield (index of the sub-request, output) as outputs come, until every one is finished.

    Raises:
        RequestError, EchoKVError: what the engine raised for one of them; the others are aborted.
    """
    outputs: _Queue = asyncio.Queue()
    tasks = [
        asyncio.create_task(_pump(engine, metrics, index, subrequest, outputs))
        for index, subrequest in enumerate(subrequests)
    ]
    unfinished = len(tasks)
    try:
        while unfinished:
            index, item = await outputs.get()
            if isinstance(item, Exception):
                raise item
            unfinished -= item.finished
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    engine: ServingEngine,
    metrics: ServerMetrics,
    index: int,
    subrequest: SubRequest,
    outputs: _Queue,
) -> None:
    observer: RequestObserver = metrics.observe(engine.model_name)
    try:
        async for output in engine.generate(
            subrequest.prompt_token_ids, subrequest.params, subrequest.request_id
        ):
            observer.output(output)
            outputs.put_nowait((index, output))
        assert observer.is_finished, f"{subrequest.request_id} ended without a finish_reason"
    except asyncio.CancelledError:
        observer.aborted()
        raise
    except Exception as error:  # the reader of the queue raises it
        outputs.put_nowait((index, error))


@dataclass
class Collected:
    """Everything that one sub-request has put out so far."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: RequestOutput | None = None

    def add(self, output: RequestOutput) -> None:
        """Append one output."""
        self.text.append(output.text)
        self.logprobs.extend(output.logprobs)
        self.last = output

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended; only once it has."""
        assert self.last is not None
        assert self.last.finish_reason is not None
        return self.last.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """What it stopped at, if anything."""
        return self.last.stop_reason if self.last else None


async def collect(outputs: IndexedOutputs, count: int) -> list[Collected]:
    """Wait for everything.

    Args:
        outputs: what `run_all` returned.
        count: how many sub-requests there are.
    """
    collected = [Collected() for _ in range(count)]
    async for index, output in outputs:
        collected[index].add(output)
    return collected


def usage_of(outputs: Sequence[RequestOutput | None]) -> Usage:
    """Tokens of several sub-requests, from the latest output of each."""
    known = [output for output in outputs if output is not None]
    prompt = sum(output.num_prompt_tokens for output in known)
    completion = sum(output.num_output_tokens for output in known)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(output.num_cached_tokens for output in known)
        ),
    )
