"""On a GPU: any device pool gives the tokens and selected sets of everything resident.

Batches are the same in both runs, so both see the same shapes; batch invariance is the reference
backend's promise, not cuBLAS's.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.harness import SelectionLog, host_pool_gib, make_engine, python_sources, tokens_of

from echokv.engine.draw import Method
from echokv.engine.engine import Engine
from echokv.engine.sampling_params import SamplingParams

TOPK = 64
MAX_LEN = 2048
COMMON: dict[str, Any] = {
    "device": "cuda",
    "max_model_len": MAX_LEN,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
}

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["triton", "cuda"])
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend that runs on this GPU."""
    name = str(request.param)
    if name == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    return name


def run(model: Path, **overrides: Any) -> tuple[list[list[int]], SelectionLog]:
    engine, log = make_engine(model, **COMMON, **overrides)
    tokens = engine.tokenizer.encode(python_sources(20_000))
    prompts = [tokens[:1], tokens[:63], tokens[:700], tokens[:1500], tokens[5000:6000]]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = engine.generate(prompts, params)
    if engine.config.offload:
        assert all(layer.evicted_rows > 0 for layer in engine.stats().layers)
    engine.close()
    return [tokens_of(one) for one in outputs], log


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "fp8_ds_mla"])
def test_offloaded_equals_resident(demo_model: Path, backend: str, kv_cache_dtype: str) -> None:
    overrides: dict[str, Any] = {"backend": backend, "kv_cache_dtype": kv_cache_dtype}
    if kv_cache_dtype == "float32":
        overrides["dtype"] = "float32"
    tokens, log = run(demo_model, offload=False, device_pool_tokens=16 * 1024, **overrides)
    gib = host_pool_gib(demo_model, 128, kv_cache_dtype)
    for pool in (9 * TOPK, 1000, 1800):
        again, other = run(
            demo_model,
            host_pool_gib=gib,
            device_pool_tokens=pool,
            check_cache=True,
            **overrides,
        )
        assert again == tokens
        assert other.selections == log.selections


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "fp8_ds_mla"])
def test_captured_decode_is_lossless_through_sharing_aborts_and_reuse(
    demo_model: Path, backend: str, kv_cache_dtype: str
) -> None:
    def run_graphs(**overrides: Any) -> list[list[int]]:
        engine, _ = make_engine(
            demo_model,
            observe=False,
            backend=backend,
            kv_cache_dtype=kv_cache_dtype,
            check_cache=True,
            **COMMON,
            **overrides,
        )
        tokens = engine.tokenizer.encode(python_sources(20_000))
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        first = [tokens[:1], tokens[:63], tokens[:700], tokens[:1500], tokens[5000:6000]]
        results = [tokens_of(one) for one in engine.generate(first, params)]
        engine.add_request("leaver", tokens[2000:3800], params)
        while len(engine.scheduler.running[0].token_ids if engine.scheduler.running else ()) < 1810:
            engine.step()
        engine.abort("leaver")
        second = [tokens[7000:7300], tokens[:1400], tokens[9000:9064], tokens[:2]]
        results += [tokens_of(one) for one in engine.generate(second, params)]
        if engine.config.offload:
            assert all(layer.evicted_rows > 0 for layer in engine.stats().layers)
            assert engine.stats().device_pool_live_slots == 0
        engine.close()
        return results

    expected = run_graphs(offload=False, device_pool_tokens=128 * 64)
    for pool in (9 * TOPK, 1000):
        offloaded = run_graphs(
            host_pool_gib=host_pool_gib(demo_model, 128, kv_cache_dtype), device_pool_tokens=pool
        )
        assert offloaded == expected


def test_captured_decode_gives_the_tokens_of_eager_decode(demo_model: Path, backend: str) -> None:
    """Batch sizes that are graph sizes: then both have the same shapes."""

    def run_one(*, enforce_eager: bool) -> list[list[int]]:
        engine, _ = make_engine(
            demo_model,
            observe=False,
            backend=backend,
            enforce_eager=enforce_eager,
            host_pool_gib=host_pool_gib(demo_model, 128, "bfloat16"),
            device_pool_tokens=1000,
            kv_cache_dtype="bfloat16",
            **COMMON,
        )
        tokens = engine.tokenizer.encode(python_sources(20_000))
        prompts = [tokens[start : start + 400] for start in (0, 3000, 6000, 9000)]
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        results = [tokens_of(one) for one in engine.generate(prompts, params)]
        engine.close()
        return results

    assert run_one(enforce_eager=False) == run_one(enforce_eager=True)


MIXED = {
    "greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    "seeded": SamplingParams(seed=1, max_tokens=40, ignore_eos=True),
    "limited": SamplingParams(seed=2, top_k=30, top_p=0.9, max_tokens=40, ignore_eos=True),
    "nucleus": SamplingParams(seed=3, top_p=0.8, min_p=0.01, max_tokens=40, ignore_eos=True),
    "patient": SamplingParams(temperature=0, min_tokens=30, max_tokens=40, ignore_eos=True),
    "short": SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
}
"""Ways to draw in a captured step: each alone decides how its whole batch is drawn."""

UNCAPTURED = {
    "reported": SamplingParams(temperature=0, logprobs=3, max_tokens=20, ignore_eos=True),
    "penalised": SamplingParams(
        temperature=0, frequency_penalty=1.5, max_tokens=12, ignore_eos=True
    ),
}


def sampled_engine(model: Path, **overrides: Any) -> Engine:
    """Captured, offloaded, with a pool so small that rows are evicted."""
    engine, _ = make_engine(
        model,
        observe=False,
        host_pool_gib=host_pool_gib(model, 128, "bfloat16"),
        device_pool_tokens=1000,
        kv_cache_dtype="bfloat16",
        enable_prefix_caching=False,  # a prompt's passes have the same shapes every time
        **COMMON,
        **overrides,
    )
    return engine


def sampled(engine: Engine, params: dict[str, SamplingParams]) -> dict[str, list[Any]]:
    """Tokens and log-probabilities of requests that run together."""
    tokens = engine.tokenizer.encode(python_sources(20_000))
    prompts = [tokens[start : start + 400] for start in range(0, 2000 * len(params), 2000)]
    outputs = engine.generate(prompts, list(params.values()))
    return {
        name: [(output.token_ids, output.logprobs, output.finish_reason) for output in one]
        for name, one in zip(params, outputs, strict=True)
    }


@pytest.mark.gpu
@pytest.mark.parametrize("names", [["greedy"], ["seeded"], ["limited"], ["nucleus"], ["patient"]])
def test_captured_draws_are_those_of_the_eager_sampler(demo_model: Path, names: list[str]) -> None:
    """From the same logits: the graphs are the same in both runs."""
    params = {name: MIXED[name] for name in ["greedy", "short", *names]}
    engine = sampled_engine(demo_model)
    captured = sampled(engine, params)
    sampler = engine._parts.runner._sampler
    sampler.captured_method = lambda requests: None  # type: ignore[method-assign]
    assert sampled(engine, params) == captured
    engine.close()


@pytest.mark.gpu
def test_async_scheduling_changes_no_output_on_a_gpu(demo_model: Path) -> None:
    """With every way to sample; a stop token too, found late, in batches that one graph serves."""
    results = []
    for ahead in (False, True):
        engine = sampled_engine(demo_model, async_scheduling=ahead, check_cache=ahead)
        results.append([sampled(engine, MIXED), sampled(engine, MIXED | UNCAPTURED)])
        drawn = results[0][0]["seeded"][10][0]
        stopping = SamplingParams(seed=1, max_tokens=40, stop_token_ids=drawn, ignore_eos=True)
        results[-1].append(sampled(engine, MIXED | {"seeded": stopping}))
        assert engine.stats().device_pool_live_slots == 0
        engine.close()
    assert results[0] == results[1]
    ends = {one[-1][2] for one in results[0][2].values()}
    assert ends == {"stop", "length"}


@pytest.mark.gpu
def test_a_captured_step_neither_allocates_nor_waits(demo_model: Path) -> None:
    engine = sampled_engine(demo_model)
    runner, graphs = engine._parts.runner, engine._parts.runner._graphs
    assert graphs is not None
    launch, methods = runner.launch, []

    def allocations() -> tuple[int, int]:
        stats = torch.cuda.memory_stats()
        return stats["allocation.all.allocated"], stats["segment.all.allocated"]

    def watched(scheduled: Any) -> Any:
        if not graphs.covers(scheduled):
            return launch(scheduled)
        before = allocations()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step = launch(scheduled)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert allocations() == before
        methods.append(runner._sampler.captured_method(step.requests))
        return step

    runner.launch = watched  # type: ignore[method-assign]
    batches = (["greedy"], ["seeded"], ["limited"], ["seeded", "limited"], ["nucleus"], ["patient"])
    for names in (*batches, list(MIXED)):
        sampled(engine, {name: MIXED[name] for name in names})
    engine.close()
    assert set(methods) == set(Method) and len(methods) > 200
