"""Offline throughput over a scripted engine and a clock that the test moves."""

from collections.abc import Sequence

import pytest

from echokv.bench.throughput import cache_figures, render_throughput, run_throughput
from echokv.bench.workload import BenchRequest
from echokv.config import EngineConfig
from echokv.engine.offline import drive
from echokv.engine.outputs import FinishReason, RequestOutput
from echokv.engine.sampling_params import SamplingParams
from echokv.engine.stats import EngineStats, LayerCacheStats
from echokv.errors import ConfigError


class ScriptedEngine:
    """Gives every request one token a step; each step takes half a second of its clock."""

    def __init__(self, *, max_waiting: int = 1024) -> None:
        self.config = EngineConfig(model="none", max_waiting_requests=max_waiting)
        self.now = 0.0
        self.steps = 0
        self.most_in_flight = 0
        self.running: dict[str, tuple[int, int]] = {}  # request id -> made, wanted

    def clock(self) -> float:
        return self.now

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        assert params.ignore_eos
        assert params.max_tokens is not None
        self.running[request_id] = (0, params.max_tokens)
        self.most_in_flight = max(self.most_in_flight, len(self.running))

    def step(self) -> list[RequestOutput]:
        self.now += 0.5
        self.steps += 1
        outputs = []
        for request_id, (made, wanted) in list(self.running.items()):
            finished = made + 1 == wanted
            self.running[request_id] = (made + 1, wanted)
            if finished:
                del self.running[request_id]
            outputs.append(
                RequestOutput(
                    request_id=request_id,
                    token_ids=(7,),
                    text="x",
                    logprobs=(),
                    finish_reason=FinishReason.LENGTH if finished else None,
                    stop_reason=None,
                    num_prompt_tokens=0,
                    num_output_tokens=made + 1,
                    num_cached_tokens=0,
                )
            )
        return outputs

    def stats(self) -> EngineStats:
        """Each step selects 10 rows in layer 0 and 4 in layer 1, and recalls 1 and 0 of them."""
        return snapshot(
            preemptions=self.steps // 4,
            prefix_cache_queries=8 * self.steps,
            prefix_cache_hits=2 * self.steps,
            layers=(layer(10 * self.steps, self.steps), layer(4 * self.steps, 0)),
        )


def layer(selected: int, recalled: int) -> LayerCacheStats:
    return LayerCacheStats(
        selected_rows=selected,
        recalled_rows=recalled,
        evicted_rows=0,
        prefetched_useful_rows=0,
        prefetched_wasted_rows=0,
        resident_rows=0,
    )


def snapshot(
    *,
    preemptions: int = 0,
    prefix_cache_queries: int = 0,
    prefix_cache_hits: int = 0,
    layers: tuple[LayerCacheStats, ...] = (),
) -> EngineStats:
    return EngineStats(
        requests_running=0,
        requests_waiting=0,
        preemptions=preemptions,
        prompt_tokens=0,
        generation_tokens=0,
        prefix_cache_queries=prefix_cache_queries,
        prefix_cache_hits=prefix_cache_hits,
        host_pool_slots=640,
        host_pool_live_slots=0,
        host_pool_cached_slots=0,
        device_pool_slots=128,
        device_pool_live_slots=0,
        layers=layers,
    )


def test_figures_are_those_worked_out_by_hand() -> None:
    engine = ScriptedEngine()
    requests = [
        BenchRequest(prompt=(1, 2, 3), output_len=4),
        BenchRequest(prompt=(1,) * 5, output_len=2),
    ]
    warmup = [BenchRequest(prompt=(9,), output_len=3)]
    tokens: list[int] = []
    result = run_throughput(
        engine, requests, warmup=warmup, on_token=tokens.append, clock=engine.clock
    )
    # Four steps of half a second; the warm-up's three are not counted.
    assert result["elapsed_time"] == 2.0
    assert result["num_requests"] == 2
    assert result["total_input_tokens"] == 8
    assert result["total_output_tokens"] == 6 == sum(tokens)
    assert result["total_num_tokens"] == 14
    assert result["requests_per_second"] == 1.0
    assert result["tokens_per_second"] == 7.0
    assert result["output_tokens_per_second"] == 3.0
    assert result["median_first_token_s"] == 0.5
    cache = result["cache"]
    assert (cache["selected_rows"], cache["recalled_rows"]) == (56, 4)
    assert cache["hit_rate"] == pytest.approx(52 / 56)
    assert cache["hit_rate_by_layer"] == [0.9, 1.0]
    assert cache["prefix_cache_hit_rate"] == 0.25
    assert cache["preemptions"] == 1
    assert (cache["host_pool_slots"], cache["device_pool_slots"]) == (640, 128)
    text = render_throughput(result)
    assert "Throughput: 1.00 requests/s, 7.00 total tokens/s, 3.00 output tokens/s" in text
    assert "92.86% (4 of 56 selected rows recalled)" in text


def test_rates_of_an_idle_engine() -> None:
    figures = cache_figures(snapshot(), snapshot())
    assert figures["hit_rate"] == 1.0
    assert figures["prefix_cache_hit_rate"] == 0.0


def test_the_queue_is_kept_within_the_engines_limit() -> None:
    engine = ScriptedEngine(max_waiting=3)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    outputs = list(drive(engine, [((1,), params)] * 10))
    assert engine.most_in_flight == 3
    assert sorted(index for index, output in outputs if output.finished) == list(range(10))


def test_text_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="token ids"):
        run_throughput(ScriptedEngine(), [BenchRequest(prompt="text", output_len=1)])
