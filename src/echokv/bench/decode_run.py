"""Whole measurements: engines made, filled, measured against each other and taken down again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from echokv.bench.decode import MAX_FILL_STEPS, StepTimer, measure_steps, name_of, run_all
from echokv.bench.decode_engine import DecodeEngine, LoadedModel, PoolSizes, SharedRows
from echokv.bench.decode_replay import SelectionSource
from echokv.bench.decode_report import step_figures, variant_figures
from echokv.bench.decode_step import kernel_times
from echokv.errors import EchoKVError

SourceMaker = Callable[[LoadedModel], SelectionSource | None]
Variants = dict[str, dict[str, Any]]

_PROFILED_STEPS = 5
_NAME_CHARS = 120
"""Of a kernel's name in a result: templates go on for ever."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How a step time is taken."""

    steps: int  # timed in each round
    rounds: int  # turns of each variant
    warmup_steps: int
    profile: int | None = None  # kernels to print; a result has them all

    @property
    def room(self) -> int:
        """Tokens that a request may decode in all."""
        return MAX_FILL_STEPS + self.warmup_steps + self.rounds * (self.steps + 1) + 2


def run_steps(
    loaded: LoadedModel,
    variants: Sequence[PoolSizes],
    source: SourceMaker,
    context_lens: Sequence[int],
    how: Steps,
) -> Variants:
    """Step times of one batch in engines of different pools, in turns.

    Args:
        loaded: the model.
        variants: pools of each engine; max_model_len leaves `how.room` beyond the contexts.
        source: makes what selects; None of it: the real indexer.
        context_lens: computed tokens of each request.
        how: how often.

    Raises:
        EchoKVError: two engines decoded different tokens, so that neither's times mean anything.
    """
    engines = [DecodeEngine(loaded, sizes, source(loaded)) for sizes in variants]
    timers = measure_steps(
        engines,
        context_lens,
        steps=how.steps,
        rounds=how.rounds,
        warmup_steps=how.warmup_steps,
    )
    figures = {
        name_of(timer.decode.sizes): variant_figures(timer.decode)
        | step_figures(timer)
        | (_profile(timer, how.profile) if how.profile else {})
        for timer in timers
    }
    tokens = {str(sorted(timer.tokens.items())) for timer in timers}
    del timers
    for decode in engines:
        decode.close()
    if len(tokens) > 1:
        raise EchoKVError(
            "the offloaded engine decoded other tokens than the resident one: no time of it counts"
        )
    return figures


def run_throughput(
    loaded: LoadedModel,
    variants: Sequence[PoolSizes],
    source: SourceMaker,
    context_lens: Sequence[Sequence[int]],
    output_len: int,
    shared: SharedRows | None = None,
) -> Variants:
    """Throughput of requests that are queued all at once, one engine after the other.

    Args:
        loaded: the model.
        variants: pools of each engine.
        source: makes what selects; None of it: the real indexer.
        context_lens: computed tokens of each variant's requests.
        output_len: tokens that each request decodes.
        shared: host memory for all of them; None: each takes its own.
    """
    figures = {}
    for sizes, lengths in zip(variants, context_lens, strict=True):
        decode = DecodeEngine(loaded, sizes, source(loaded), shared)
        measured = run_all(decode, lengths, output_len)
        figures[name_of(sizes)] = variant_figures(decode) | measured
        decode.close()
    return figures


def _profile(timer: StepTimer, listed: int) -> dict[str, Any]:
    """Every kernel's time in a step on the GPU, in the order of time; prints the first ones."""
    times = kernel_times(timer.device_step, _PROFILED_STEPS)
    total = sum(us for _, us, _ in times)
    launches = sum(number for _, _, number in times)
    name = name_of(timer.decode.sizes)
    print(f"{name}: {total:.0f} us and {launches:.0f} kernels a step on the GPU")
    for kernel, us, number in times[:listed]:
        print(f"{us:9.1f} us {number:7.1f} x {us / number:7.2f} us  {kernel[:100]}")
    kernels = [
        {"name": kernel[:_NAME_CHARS], "us": us, "launches": number} for kernel, us, number in times
    ]
    return {"kernels": kernels}
