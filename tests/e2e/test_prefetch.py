"""A prediction decides what moves early, never what comes out: hostile ones, the same tokens.

Selected sets too. `test_lossless.py` compares with each request alone, through preemptions.
"""

from collections.abc import Callable
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
from tests.kernels.cuda_emulator import COMPILER, emulated_kernels

from echokv.config import EngineConfig
from echokv.engine import build
from echokv.engine.build import EngineHooks
from echokv.engine.engine import Engine
from echokv.engine.sampling_params import SamplingParams
from echokv.engine.stats import EngineStats
from echokv.errors import ConfigError
from echokv.indexer.prefetch import PrefetchBudget
from echokv.indexer.threshold import Predictions

CHECKPOINT = Path(__file__).parents[2] / "examples" / "demo_model" / "checkpoint"
TOPK = 64
MAX_LEN = 512
RANDOM = torch.Generator().manual_seed(4)
HUGE = PrefetchBudget(rows_per_unit=2**20, least=2**20)


def fill(value: float) -> Callable[[Predictions], None]:
    def overwrite(predictions: Predictions) -> None:
        predictions.thresholds.fill_(value)
        predictions.shifts.fill_(value)
        predictions.limits.fill_(2**30)

    return overwrite


def scatter(predictions: Predictions) -> None:
    """Another mixture in every step, limits included."""
    shape = predictions.thresholds.shape
    values = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, -1e30, 0.02, 0.2])
    chosen = values[torch.randint(len(values), shape, generator=RANDOM)]
    predictions.thresholds.copy_(chosen)
    predictions.useful.copy_(torch.rand(shape, generator=RANDOM) * 40)
    predictions.vain.copy_(torch.rand(shape, generator=RANDOM) * 40)
    shifts = predictions.shifts
    shifts.copy_(values[torch.randint(len(values), shifts.shape, generator=RANDOM)])
    predictions.limits.copy_(torch.randint(-9, 99, shape, generator=RANDOM))


HOSTILE: dict[str, Callable[[Predictions], None]] = {
    "zero": fill(0.0),
    "infinity": fill(torch.inf),
    "minus infinity": fill(-torch.inf),
    "NaN": fill(torch.nan),
    "huge negative": fill(-1e30),
    "random": scatter,
}
NEVER = {"infinity", "NaN"}
"""Thresholds that no score beats."""


def run(
    model: Path,
    *,
    hooks: EngineHooks,
    device_pool_tokens: int = 9 * TOPK,
    **overrides: Any,
) -> tuple[list[list[int]], SelectionLog, EngineStats]:
    """Requests that share prefixes, one that leaves; every request decodes past index_topk."""
    engine, log = make_engine(
        model,
        hooks=hooks,
        host_pool_gib=host_pool_gib(model, 40),
        device_pool_tokens=device_pool_tokens,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        check_cache=True,
        **({"prefetch": "on"} | overrides),
    )
    poison_released_rows(engine)
    tokens = engine.tokenizer.encode(python_sources(6000))
    prompts = [
        tokens[:1],
        tokens[:330],
        tokens[:230] + tokens[900:920],
        tokens[:330] + tokens[2000:2020],
        tokens[3000:3190],
    ]
    params = [
        SamplingParams(
            temperature=0.8 * (seed % 2),
            seed=seed,
            max_tokens=24,
            ignore_eos=True,
        )
        for seed in range(len(prompts))
    ]
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(index), prompt, one)
    engine.add_request("leaver", tokens[:300], params[0])
    results: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    steps = 0
    while engine.has_work:
        for output in engine.step():
            results.setdefault(output.request_id, []).extend(output.token_ids)
        steps += 1
        if steps == 12:
            engine.abort("leaver")
            results.pop("leaver", None)
    stats = engine.stats()
    assert stats.host_pool_live_slots == stats.device_pool_live_slots == 0
    engine.close()
    return [results[str(index)] for index in range(len(prompts))], log, stats


@pytest.fixture(scope="module")
def without(demo_model: Path) -> tuple[list[list[int]], SelectionLog]:
    """No prefetch, and nothing counted as such."""
    tokens, log, stats = run(demo_model, hooks=EngineHooks(), prefetch="off")
    assert {layer.prefetched_useful_rows for layer in stats.layers} == {0}
    assert {layer.prefetched_wasted_rows for layer in stats.layers} == {0}
    return tokens, log


def same(run_now: tuple, run_before: tuple[list[list[int]], SelectionLog]) -> EngineStats:
    """Equal tokens, and equal sets wherever both computed them; the stats."""
    tokens, log, stats = run_now
    expected, expected_log = run_before
    assert tokens == expected
    common = log.selections.keys() & expected_log.selections.keys()
    assert len(common) > 0.7 * len(expected_log.selections)
    assert all(log.selections[key] == expected_log.selections[key] for key in common)
    return stats


def moved(stats: EngineStats) -> list[int]:
    return [layer.prefetched_useful_rows + layer.prefetched_wasted_rows for layer in stats.layers]


@pytest.mark.parametrize("pool", [4 * TOPK, 9 * TOPK, 700])
def test_prefetch_changes_no_token_and_no_set(
    demo_model: Path, without: tuple[list[list[int]], SelectionLog], pool: int
) -> None:
    """In a small pool a full batch leaves no room, and prefetches nothing; a smaller one does."""
    stats = same(run(demo_model, hooks=EngineHooks(), device_pool_tokens=pool), without)
    assert all(layer.evicted_rows > 0 for layer in stats.layers)
    assert min(moved(stats)) > 0
    assert sum(layer.prefetched_useful_rows for layer in stats.layers) > 0


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_thresholds(
    demo_model: Path, without: tuple[list[list[int]], SelectionLog], name: str
) -> None:
    hooks = EngineHooks(on_predictions=HOSTILE[name], prefetch_budget=HUGE)
    stats = same(run(demo_model, hooks=hooks, device_pool_tokens=700), without)
    assert (min(moved(stats)) > 0) == (name not in NEVER)


@pytest.mark.parametrize(
    "budget",
    [
        PrefetchBudget(rows_per_unit=0, least=0),
        PrefetchBudget(rows_per_unit=0, least=1),
        PrefetchBudget(rows_per_unit=400, least=0),
        HUGE,
    ],
    ids=["none", "one row", "some", "huge"],
)
def test_hostile_budgets(
    demo_model: Path, without: tuple[list[list[int]], SelectionLog], budget: PrefetchBudget
) -> None:
    hooks = EngineHooks(on_predictions=fill(-1e30), prefetch_budget=budget)
    stats = same(run(demo_model, hooks=hooks, device_pool_tokens=700), without)
    assert (min(moved(stats)) > 0) == (budget.least + budget.rows_per_unit > 0)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_the_fused_prefetch(
    demo_model: Path,
    without: tuple[list[list[int]], SelectionLog],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The CUDA sources on the CPU: one launch finds and fetches, hostile predictions included."""
    monkeypatch.setattr(build, "load_kernels", lambda *_: emulated_kernels())
    hooks = EngineHooks(on_predictions=scatter, prefetch_budget=HUGE)
    stats = same(run(demo_model, hooks=hooks, device_pool_tokens=700), without)
    assert min(moved(stats)) > 0
    assert all(layer.evicted_rows > 0 for layer in stats.layers)


def prefill_only(shifts: Callable[[Predictions], None]) -> EngineHooks:
    def overwrite(predictions: Predictions) -> None:
        shifts(predictions)
        predictions.thresholds.fill_(torch.nan)

    return EngineHooks(on_predictions=overwrite)


def run_cached(model: Path, **options: Any) -> tuple[list[list[int]], SelectionLog, EngineStats]:
    """Prompts that begin as one before, whose rows another has driven out of the device pool."""
    engine, log = make_engine(
        model, host_pool_gib=host_pool_gib(model, 30), device_pool_tokens=400, max_model_len=400,
        max_num_seqs=1, max_num_batched_tokens=128, check_cache=True,
        **({"prefetch": "on"} | options),
    )  # fmt: skip
    tokens = engine.tokenizer.encode(python_sources(6000))
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    prompts = [tokens[:300], tokens[1000:1390], tokens[:300] + tokens[500:570], tokens[1000:1300]]
    outputs = [tokens_of(one) for one in engine.generate(prompts, params)]
    stats = engine.stats()
    engine.close()
    return outputs, log, stats


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_prefill_moves_rows_before_they_are_selected(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the shifts are, what is fetched early is fetched once, counted, and selected."""
    tokens, log, stats = run_cached(demo_model, prefetch="off")
    assert moved(stats) == [0, 0, 0] and min(layer.recalled_rows for layer in stats.layers) > 200
    kernels = emulated_kernels()
    fetch = kernels.fused_prefetch.prefill_scores_prefetch
    came: list[int] = []

    def counting(*args: Any, **options: Any) -> Any:
        scores, found = fetch(*args, **options)
        came.append(int((found.host_slots >= 0).sum()))
        return scores, found

    kernels.fused_prefetch.prefill_scores_prefetch = counting
    monkeypatch.setattr(build, "load_kernels", lambda *_: kernels)
    least = {"learnt": 100, "random": 1, "NaN": 0}
    for name, shifts in {
        "learnt": lambda _: None,
        "random": scatter,
        "NaN": fill(torch.nan),
    }.items():
        came.clear()
        found = run_cached(demo_model, hooks=prefill_only(shifts))
        stats = same(found, (tokens, log))
        print(name, sum(came), moved(stats), [x.recalled_rows for x in stats.layers])
        assert sum(came) >= least[name]
        assert sum(moved(stats)) == sum(came)
        assert all(layer.prefetched_wasted_rows == 0 for layer in stats.layers)
    came.clear()
    stats = same(run_cached(demo_model, prefetch="decode"), (tokens, log))
    assert came == [] and sum(moved(stats)) > 0


def test_the_trained_model_prefetches_what_it_needs() -> None:
    """Real selections: more than a third of what moves early is selected, and no token changes."""

    def run_demo(**options: Any) -> tuple[list[list[int]], SelectionLog, EngineStats]:
        engine, log = make_engine(
            CHECKPOINT, host_pool_gib=0.05, device_pool_tokens=560, max_model_len=768,
            max_num_seqs=2, max_num_batched_tokens=700, dtype="float32", check_cache=True,
            **({"prefetch": "on"} | options),
        )  # fmt: skip
        tokens = engine.tokenizer.encode(python_sources(4000))
        prompts = [tokens[:700], tokens[:640] + tokens[700:760]]  # the second finds ten blocks
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        outputs = engine.generate(prompts, params)
        stats = engine.stats()
        engine.close()
        return [tokens_of(one) for one in outputs], log, stats

    tokens, log, _ = run_demo(prefetch="off")
    stats = same(run_demo(), (tokens, log))
    useful = sum(layer.prefetched_useful_rows for layer in stats.layers)
    assert 0 < sum(moved(stats)) < 3 * useful
    hostile = EngineHooks(on_predictions=scatter, prefetch_budget=HUGE)
    same(run_demo(hooks=hostile), (tokens, log))


def test_everything_resident_never_prefetches(demo_model: Path) -> None:
    engine = Engine(
        EngineConfig(
            model=str(demo_model), offload=False, device_pool_tokens=512, max_model_len=256
        )
    )
    tokens = engine.tokenizer.encode(python_sources(200))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert len(tokens_of(engine.generate([tokens], params)[0])) == 8
    assert moved(engine.stats()) == [0, 0, 0]
    engine.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefetch": "maybe"}, "not one of auto, on, decode, off"),
        ({"offload": False}, "on contradicts"),
        ({"offload": False, "prefetch": "decode"}, "decode contradicts"),
    ],
)
def test_contradictions_are_refused(demo_model: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"--prefetch.*{words}"):
        Engine(EngineConfig(model=str(demo_model), **({"prefetch": "on"} | options)))


def test_only_running_requests_have_predictions(demo_model: Path) -> None:
    """A context of at most index_topk predicts nothing; whoever takes a slot over starts anew."""
    seen: list[tuple[int, list[bool]]] = []
    engine: Engine

    def look(predictions: Predictions) -> None:
        known = predictions.thresholds.isfinite() | (predictions.limits < 0)  # or they rest
        assert (known.any(0) == known.all(0)).all()  # all layers of a request, or none
        seen.append((engine.scheduler.running[0].request_slot, known[0].tolist()))

    engine = Engine(
        EngineConfig(
            model=str(demo_model), host_pool_gib=host_pool_gib(demo_model, 20),
            device_pool_tokens=5 * TOPK, max_model_len=256, max_num_seqs=2, prefetch="on",
        ),
        hooks=EngineHooks(on_predictions=look),
    )  # fmt: skip
    tokens = engine.tokenizer.encode(python_sources(300))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for prompt in (tokens[:100], tokens[:50]):
        engine.generate([prompt], params)
        first, second = seen[:2], seen[2:]
        assert not any(any(known) for _, known in first)  # the prompt, the first decode step
        assert len(second) == 4
        for slot, known in second:
            assert known[slot] == (len(prompt) + 2 > TOPK) and sum(known) == known[slot]
        seen.clear()
    engine.close()
