"""The headline: same tokens and same selected sets for any device pool and any batch mix."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.harness import (
    SelectionLog,
    host_pool_gib,
    make_engine,
    poison_released_rows,
    python_sources,
    tokens_of,
)

from echokv.engine.build import NO_HOOKS, EngineHooks
from echokv.engine.engine import Engine
from echokv.engine.outputs import FinishReason, RequestOutput
from echokv.engine.sampling_params import SamplingParams
from echokv.indexer.prefetch import PrefetchBudget
from echokv.indexer.threshold import Predictions

TOPK = 64
MAX_LEN = 512
CANCEL_AFTER = 8
COMMON: dict[str, Any] = {
    "max_model_len": MAX_LEN,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
}


def make_prompts(engine: Engine) -> dict[str, list[int]]:
    """Eight prompts of different lengths; three share 200 tokens, two of those 330."""
    tokens = engine.tokenizer.encode(python_sources(12_000))
    shared, longer = tokens[:200], tokens[:330]
    return {
        "one-token": tokens[5000:5001],
        "short": tokens[1000:1063],
        "block": tokens[2000:2064],
        "topk": tokens[3000 : 3000 + TOPK + 1],
        "shared-a": shared + tokens[6000:6100],
        "shared-b": longer + tokens[7000:7007],
        "shared-c": longer + tokens[8000:8100],
        "cancelled": tokens[9000:9300],
    }


PARAMS = {
    "one-token": SamplingParams(temperature=0, max_tokens=130, ignore_eos=True),
    "short": SamplingParams(temperature=0.8, seed=7, max_tokens=16, ignore_eos=True),
    "block": SamplingParams(temperature=0, max_tokens=130, ignore_eos=True),
    "topk": SamplingParams(temperature=1.2, top_p=0.9, seed=1, max_tokens=130, ignore_eos=True),
    "shared-a": SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
    "shared-b": SamplingParams(temperature=0, max_tokens=18, ignore_eos=True),
    "shared-c": SamplingParams(temperature=1, top_k=20, seed=5, max_tokens=16, ignore_eos=True),
    "cancelled": SamplingParams(temperature=0, max_tokens=200, ignore_eos=True),
}


def invent(predictions: Predictions) -> None:
    """Thresholds that nothing was learnt from, another set in every step."""
    values = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, -1e30, 0.02, 0.2])
    shape = predictions.thresholds.shape
    predictions.thresholds.copy_(values[torch.randint(len(values), shape, generator=RANDOM)])
    predictions.limits.copy_(torch.randint(-1, 99, shape, generator=RANDOM))


RANDOM = torch.Generator().manual_seed(8)
HOSTILE_PREDICTIONS = EngineHooks(
    on_predictions=invent, prefetch_budget=PrefetchBudget(rows_per_unit=2**20, least=2**20)
)


@pytest.fixture(scope="module")
def alone(demo_model: Path) -> tuple[dict[str, list[int]], SelectionLog]:
    """Each request by itself, everything resident, no prefix cache: what must come out."""
    engine, log = make_engine(
        demo_model, offload=False, device_pool_tokens=2048, enable_prefix_caching=False, **COMMON
    )
    tokens = {}
    for name, prompt in make_prompts(engine).items():
        engine.add_request(name, prompt, PARAMS[name])
        outputs = []
        while engine.has_work and not (name == "cancelled" and len(outputs) == CANCEL_AFTER):
            outputs += engine.step()
        engine.abort(name)
        tokens[name] = tokens_of(outputs)
    engine.close()
    return tokens, log


def run_batch(engine: Engine) -> dict[str, list[RequestOutput]]:
    """All eight at once; one is cancelled midway, two arrive late."""
    prompts = make_prompts(engine)
    outputs: dict[str, list[RequestOutput]] = {name: [] for name in prompts}
    late = ["shared-b", "short"]
    for name, prompt in prompts.items():
        if name not in late:
            engine.add_request(name, prompt, PARAMS[name])
    steps, cancelled = 0, False
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
        steps += 1
        if steps == 9:
            for name in late:
                engine.add_request(name, prompts[name], PARAMS[name])
        if len(outputs["cancelled"]) == CANCEL_AFTER and not cancelled:
            ended = engine.abort("cancelled")
            assert ended is not None and ended.finish_reason is FinishReason.ABORT
            cancelled = True
    return outputs


@pytest.mark.parametrize(
    ("device_pool_tokens", "num_host_blocks", "prefix_caching", "preempts", "hooks"),
    [
        (9 * TOPK, 10, True, True, NO_HOOKS),  # the smallest pool that runs eight requests
        (9 * TOPK, 24, True, False, NO_HOOKS),
        (3 * TOPK, 24, False, False, NO_HOOKS),  # two run at a time
        (5 * TOPK, 10, False, True, NO_HOOKS),
        (7 * TOPK, 10, True, True, HOSTILE_PREDICTIONS),
    ],
)
def test_any_pool_and_any_mix_give_the_tokens_and_sets_of_each_request_alone(
    demo_model: Path,
    alone: tuple[dict[str, list[int]], SelectionLog],
    device_pool_tokens: int,
    num_host_blocks: int,
    prefix_caching: bool,
    preempts: bool,
    hooks: EngineHooks,
) -> None:
    engine, log = make_engine(
        demo_model,
        host_pool_gib=host_pool_gib(demo_model, num_host_blocks),
        device_pool_tokens=device_pool_tokens,
        enable_prefix_caching=prefix_caching,
        check_cache=True,
        hooks=hooks,
        prefetch="on",
        **COMMON,
    )
    poison_released_rows(engine)
    outputs = run_batch(engine)
    stats = engine.stats()
    assert (stats.preemptions > 0) == preempts
    assert (log.repeats > 0) == preempts
    assert (stats.prefix_cache_hits > 0) == prefix_caching
    assert all(layer.evicted_rows > 0 for layer in stats.layers)
    prefetched = [
        layer.prefetched_useful_rows + layer.prefetched_wasted_rows for layer in stats.layers
    ]
    assert min(prefetched) > 0
    assert stats.host_pool_live_slots == stats.device_pool_live_slots == 0

    expected, expected_log = alone
    for name, wanted in expected.items():
        tokens = tokens_of(outputs[name])
        if name == "cancelled":
            assert tokens == wanted and len(tokens) == CANCEL_AFTER
        else:
            assert tokens == wanted
        reference = expected_log.of(name)
        mine = log.of(name)
        assert mine and all(reference[key] == chosen for key, chosen in mine.items())
        if not prefix_caching and name != "cancelled":
            assert mine.keys() == reference.keys()
    engine.close()


def test_a_pool_at_its_minimum_attends_a_prefill_chunk_in_pieces(
    demo_model: Path, alone: tuple[dict[str, list[int]], SelectionLog]
) -> None:
    engine, log = make_engine(
        demo_model,
        host_pool_gib=host_pool_gib(demo_model, 32),
        device_pool_tokens=2 * TOPK,
        check_cache=True,
        **COMMON,
    )
    engine.add_request("shared-c", make_prompts(engine)["shared-c"], PARAMS["shared-c"])
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert tokens_of(outputs) == alone[0]["shared-c"]
    assert log.of("shared-c") == alone[1].of("shared-c")
    engine.close()
