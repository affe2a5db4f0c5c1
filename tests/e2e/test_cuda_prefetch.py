"""On a GPU, in captured graphs: prefetch on a side stream changes no token, whatever it predicts.

Batches are the same in all runs, so all see the same shapes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.harness import host_pool_gib, make_engine, python_sources, tokens_of

from echokv.engine.build import NO_HOOKS, EngineHooks
from echokv.engine.sampling_params import SamplingParams
from echokv.engine.stats import EngineStats
from echokv.indexer.prefetch import PrefetchBudget
from echokv.indexer.threshold import Predictions

TOPK = 64
BACKENDS = ["triton", "cuda"]
COMMON: dict[str, Any] = {
    "device": "cuda",
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "check_cache": True,
    "prefetch": "on",
}


def invent(predictions: Predictions) -> None:
    """Thresholds that nothing was learnt from, another set in every step."""
    shape, device = predictions.thresholds.shape, predictions.thresholds.device
    values = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, -1e30, 0.02, 0.2], device=device)
    predictions.thresholds.copy_(values[torch.randint(len(values), shape, device=device)])
    predictions.limits.copy_(torch.randint(-9, 99, shape, device=device))
    shifts = predictions.shifts
    shifts.copy_(values[torch.randint(len(values), shifts.shape, device=device)])


def run(
    model: Path, pool: int, dtype: str, *, hooks: EngineHooks = NO_HOOKS, **overrides: Any
) -> tuple[list[list[int]], EngineStats]:
    """Two batches that share prefixes, between them a request that leaves."""
    engine, _ = make_engine(
        model,
        observe=False,
        hooks=hooks,
        kv_cache_dtype=dtype,
        host_pool_gib=host_pool_gib(model, 128, dtype),
        device_pool_tokens=pool,
        **(COMMON | overrides),
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
    stats = engine.stats()
    assert stats.device_pool_live_slots == 0
    engine.close()
    return results, stats


def moved(stats: EngineStats) -> list[int]:
    return [layer.prefetched_useful_rows + layer.prefetched_wasted_rows for layer in stats.layers]


HUGE = PrefetchBudget(rows_per_unit=2**20, least=2**20)
HOSTILE = EngineHooks(on_predictions=invent, prefetch_budget=HUGE)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["fp8_ds_mla", "bfloat16"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_prefetch_changes_no_token(
    demo_model: Path, backend: str, dtype: str, enforce_eager: bool
) -> None:
    if backend == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    common: dict[str, Any] = {"backend": backend, "enforce_eager": enforce_eager}
    expected, stats = run(demo_model, 1000, dtype, prefetch="off", **common)
    assert moved(stats) == [0, 0, 0]
    for hooks in (NO_HOOKS, HOSTILE):
        tokens, stats = run(demo_model, 1000, dtype, hooks=hooks, **common)
        assert tokens == expected
        assert min(moved(stats)) > 0
        assert all(layer.evicted_rows > 0 for layer in stats.layers)


@pytest.mark.gpu
def test_hostile_predictions_in_a_pool_at_its_minimum(demo_model: Path) -> None:
    expected, _ = run(demo_model, 1000, "bfloat16", backend="triton", prefetch="off")
    tokens, _ = run(demo_model, 5 * TOPK, "bfloat16", backend="triton", hooks=HOSTILE)
    assert tokens == expected


def only_prefill(predictions: Predictions) -> None:
    predictions.thresholds.fill_(torch.nan)


def only_prefill_hostile(predictions: Predictions) -> None:
    invent(predictions)
    only_prefill(predictions)


@pytest.mark.gpu
def test_prefill_moves_rows_before_they_are_selected(demo_model: Path) -> None:
    """Prompts that begin as one before, whose rows another has driven out of the device pool."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")

    def run_cached(**options: Any) -> tuple[list[list[int]], EngineStats]:
        engine, _ = make_engine(
            demo_model, observe=False, backend="cuda", kv_cache_dtype="bfloat16",
            index_key_dtype="fp8", host_pool_gib=host_pool_gib(demo_model, 128, "bfloat16"),
            device_pool_tokens=2000,
            **(COMMON | {"max_num_seqs": 1} | options),
        )  # fmt: skip
        tokens = engine.tokenizer.encode(python_sources(20_000))
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        prompts = [
            tokens[:1400], tokens[4000:5900], tokens[:1400] + tokens[6000:6500],
            tokens[4000:5500], tokens[:1000] + tokens[7000:7900],
        ]  # fmt: skip
        outputs = [tokens_of(one) for one in engine.generate(prompts, params)]
        stats = engine.stats()
        engine.close()
        return outputs, stats

    expected, stats = run_cached(prefetch="off")
    assert moved(stats) == [0, 0, 0]
    assert min(layer.recalled_rows for layer in stats.layers) > 1000
    for overwrite in (only_prefill, only_prefill_hostile):
        tokens, stats = run_cached(hooks=EngineHooks(on_predictions=overwrite))
        assert tokens == expected
        assert sum(moved(stats)) > 0 or overwrite is only_prefill_hostile
        assert all(layer.prefetched_wasted_rows == 0 for layer in stats.layers)
