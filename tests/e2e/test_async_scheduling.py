"""Choosing a step before the last one's tokens are known changes no output.

On a CPU a step is done when it was launched, but its tokens are looked at one step late all the
same: ends are found late, and the extra tokens of ended requests computed and dropped.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import host_pool_gib, make_engine, poison_released_rows, python_sources

from echokv.engine.engine import Engine
from echokv.engine.outputs import RequestOutput
from echokv.engine.sampling_params import SamplingParams

COMMON: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
    "check_cache": True,
}

Final = tuple[list[int], str, str | None, str | int | None, int, list[Any]]
"""Tokens, text, finish reason, stop reason, output tokens counted, log-probabilities."""


def final(outputs: list[RequestOutput]) -> Final:
    """All that the client sees of a request."""
    last = outputs[-1]
    assert last.finished and not any(output.finished for output in outputs[:-1])
    return (
        [token for output in outputs for token in output.token_ids],
        "".join(output.text for output in outputs),
        last.finish_reason,
        last.stop_reason,
        last.num_output_tokens,
        [logprobs for output in outputs for logprobs in output.logprobs],
    )


def make_requests(engine: Engine) -> dict[str, tuple[list[int], SamplingParams]]:
    """Every way to sample and to end; several share a prefix."""
    tokens = engine.tokenizer.encode(python_sources(12_000))
    shared = tokens[:150]

    def sampling(**params: Any) -> SamplingParams:
        return SamplingParams(**{"max_tokens": 40, "ignore_eos": True} | params)

    return {
        "greedy": (tokens[1000:1100], sampling(temperature=0, max_tokens=90)),
        "one": (tokens[2000:2063], sampling(temperature=0, max_tokens=1)),
        "two": (tokens[2000:2064], sampling(temperature=0, max_tokens=2)),
        "seeded": (shared + tokens[500:520], sampling(seed=1)),
        "limited": (shared + tokens[600:640], sampling(seed=2, top_k=30, top_p=0.9)),
        "nucleus": (shared, sampling(seed=3, top_p=0.8, min_p=0.01)),
        "reported": (shared + tokens[700:720], sampling(temperature=0, logprobs=2)),
        "penalised": (
            tokens[4000:4040],
            sampling(temperature=0, frequency_penalty=1.5, repetition_penalty=1.2, max_tokens=15),
        ),
        "patient": (tokens[5000:5010], sampling(temperature=0, min_tokens=8, ignore_eos=False)),
        "long": (tokens[3000:3300], sampling(seed=4, max_tokens=70)),
    }


def with_stops(plain: dict[str, Final]) -> dict[str, dict[str, Any]]:
    """Stop conditions that end requests midway, made from what they say without."""
    greedy, seeded, nucleus = (plain[name][0] for name in ("greedy", "seeded", "nucleus"))
    limited = plain["limited"][1]
    middle = max(range(1, len(limited) - 1), key=lambda at: limited.find(limited[at : at + 2]))
    return {
        "greedy": {"stop_token_ids": (greedy[27],)},  # the 128th token: it fills a block
        "seeded": {"stop_token_ids": (seeded[22],), "min_tokens": 5},
        "nucleus": {"stop_token_ids": (nucleus[0],)},
        "limited": {"stop": (limited[middle : middle + 2],)},
    }


def run(engine: Engine, changes: dict[str, dict[str, Any]], *, gradually: bool) -> dict[str, Final]:
    """All requests at once or one after three steps each, with two more that are aborted."""
    requests = make_requests(engine)
    for name, changed in changes.items():
        prompt, params = requests[name]
        requests[name] = prompt, SamplingParams(**vars(params) | changed)
    leavers = {
        name: (prompt, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
        for name, prompt in (("leaver", requests["long"][0]), ("other", requests["seeded"][0]))
    }
    outputs: dict[str, list[RequestOutput]] = {name: [] for name in (requests | leavers)}
    queue = list((requests | leavers).items())
    steps = 0
    while engine.has_work or queue:
        if queue and (not gradually or steps % 3 == 0):
            for name, (prompt, params) in queue[:1] if gradually else queue:
                engine.add_request(name, prompt, params)
            del queue[: 1 if gradually else None]
        for output in engine.step():
            outputs[output.request_id].append(output)
        for name in leavers:
            if len(outputs[name]) >= 9 and not outputs[name][-1].finished:
                ended = engine.abort(name)
                assert ended is not None
                outputs[name].append(ended)
        steps += 1
    for name in leavers:
        assert outputs.pop(name)[-1].finish_reason == "abort"
    stats = engine.stats()
    assert stats.host_pool_live_slots == stats.device_pool_live_slots == 0
    assert stats.requests_running == stats.requests_waiting == 0
    return {name: final(one) for name, one in outputs.items()}


@pytest.fixture(scope="module")
def expected(demo_model: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Final]]:
    """Stop conditions, and every request step by step, everything resident."""
    engine, _ = make_engine(
        demo_model,
        observe=False,
        async_scheduling=False,
        offload=False,
        device_pool_tokens=4096,
        **COMMON,
    )
    changes = with_stops(run(engine, {}, gradually=False))
    results = run(engine, changes, gradually=False)
    engine.close()
    assert {one[2] for one in results.values()} == {"stop", "length"}
    assert sum(one[2] == "stop" for one in results.values()) >= 3
    return changes, results


@pytest.mark.parametrize(
    ("num_host_blocks", "prefix_caching", "gradually"),
    [(64, True, False), (12, True, True), (12, False, False)],
)
def test_outputs_are_those_of_step_by_step(
    demo_model: Path,
    expected: tuple[dict[str, dict[str, Any]], dict[str, Final]],
    num_host_blocks: int,
    prefix_caching: bool,
    gradually: bool,
) -> None:
    changes, results = expected
    engine, _ = make_engine(
        demo_model,
        observe=False,
        host_pool_gib=host_pool_gib(demo_model, num_host_blocks),
        device_pool_tokens=9 * 64,
        enable_prefix_caching=prefix_caching,
        **COMMON,
    )
    poison_released_rows(engine)
    assert run(engine, changes, gradually=gradually) == results
    assert (engine.stats().prefix_cache_hits > 0) == prefix_caching
    counted = sum(one[4] for one in results.values())
    assert engine.stats().generation_tokens >= counted
    engine.close()


def test_a_step_is_launched_before_the_last_one_is_read(demo_model: Path) -> None:
    """The order of the two, and what it computes for a request that ends unforeseen."""
    counts = {}
    for ahead in (True, False):
        engine, _ = make_engine(
            demo_model,
            observe=False,
            async_scheduling=ahead,
            host_pool_gib=host_pool_gib(demo_model, 16),
            device_pool_tokens=9 * 64,
            **COMMON,
        )
        runner, events = engine._parts.runner, []
        launch = runner.launch

        def launch_and_note(scheduled: Any, launch: Any = launch, events: Any = events) -> Any:
            events.append("launch")
            step = launch(scheduled)
            read = step.read

            def read_and_note() -> Any:
                events.append("read")
                return read()

            step.read = read_and_note
            return step

        runner.launch = launch_and_note  # type: ignore[method-assign]
        prompt = engine.tokenizer.encode(python_sources(2000))[:100]
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        [outputs] = engine.generate([prompt], params)
        assert len(outputs) == 6 and events.count("launch") == 6
        together = events == ["launch", "launch", *["read", "launch"] * 4, "read", "read"]
        assert together == ahead
        stop = outputs[2].token_ids
        events.clear()
        engine.add_request("stopped", prompt, SamplingParams(temperature=0, stop_token_ids=stop))
        while engine.has_work:
            engine.step()
        counts[ahead] = events.count("launch")
        engine.close()
    assert counts[True] == counts[False] + 1


def test_a_random_load_gives_the_outputs_of_step_by_step(demo_model: Path) -> None:
    """Random ends, aborts and arrivals on a small pool; every survivor says what it would."""
    rng = random.Random(5)
    engine, _ = make_engine(
        demo_model,
        observe=False,
        host_pool_gib=host_pool_gib(demo_model, 8),
        device_pool_tokens=9 * 64,
        **COMMON,
    )
    tokens = engine.tokenizer.encode(python_sources(12_000))
    requests = {}
    for index in range(10):
        start, size = rng.choice([0, 0, rng.randrange(3000)]), rng.choice([1, 20, 63, 64])
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            seed=index,
            top_k=rng.choice([0, 20]),
            max_tokens=130 if index < 4 else rng.randint(1, 40),
            stop_token_ids=() if index < 4 else tuple(rng.sample(range(256), 3)),
            ignore_eos=True,
        )
        requests[f"r{index}"] = tokens[start : start + size], params
    poison_released_rows(engine)
    outputs: dict[str, list[RequestOutput]] = {name: [] for name in requests}
    waiting = dict(requests)
    while engine.has_work or waiting:
        for name in list(waiting)[: rng.choice([1, 3])]:
            engine.add_request(name, *waiting.pop(name))
        for output in engine.step():
            outputs[output.request_id].append(output)
        if rng.random() < 0.02 and len(engine.scheduler.running) > 2:
            name = engine.scheduler.running[-1].request_id
            engine.abort(name)
            del requests[name]
    assert engine.stats().preemptions > 0
    assert engine.stats().host_pool_live_slots == engine.stats().device_pool_live_slots == 0
    assert len(requests) > 4
    engine.close()
    plain, _ = make_engine(
        demo_model,
        observe=False,
        **COMMON | {"check_cache": False},
        async_scheduling=False,
        offload=False,
        device_pool_tokens=4096,
    )
    prompts, params_of = zip(*requests.values(), strict=True)
    for name, wanted in zip(requests, plain.generate(prompts, params_of), strict=True):
        assert final(outputs[name]) == final(wanted), name
    plain.close()
