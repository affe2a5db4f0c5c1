"""On a GPU: any device pool gives the tokens and selected sets of everything resident.

Batches are the same in both runs, so both see the same shapes; batch invariance is the reference
backend's promise, not cuBLAS's.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.harness import SelectionLog, host_pool_gib, make_engine, python_sources, tokens_of

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
