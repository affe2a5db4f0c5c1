"""AsyncEngine over a small real model: concurrency, leaving early, draining, failing."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from echokv.config import EngineConfig
from echokv.engine.async_engine import AsyncEngine, EngineDeadError
from echokv.engine.outputs import FinishReason, RequestOutput
from echokv.engine.sampling_params import SamplingParams
from echokv.errors import CheckpointError, RequestError
from echokv.models.random_checkpoint import write_random_checkpoint

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path: Path = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(path, num_hidden_layers=2, hidden_size=128)
    return EngineConfig(
        model=str(path), host_pool_gib=0.02, device_pool_tokens=256, max_model_len=512
    )


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


def run(config: EngineConfig, scenario: Any) -> Any:
    async def main() -> Any:
        engine = AsyncEngine(config)
        await engine.start()
        try:
            return await asyncio.wait_for(scenario(engine), 60)
        finally:
            engine.stop()

    return asyncio.run(main())


def test_requests_run_at_once_and_end(config: EngineConfig) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=5, **GREEDY)
        results = await asyncio.gather(
            *(collect(engine.generate([1, 2, index], params, f"r{index}")) for index in range(5))
        )
        for outputs in results:
            assert sum(len(output.token_ids) for output in outputs) == 5
            assert outputs[-1].finish_reason is FinishReason.LENGTH

    run(config, scenario)


def test_an_unacceptable_request_is_refused_before_any_output(config: EngineConfig) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        for prompt in ([], [10**6], [1] * 600):
            with pytest.raises(RequestError):
                await collect(engine.generate(prompt, SamplingParams(), "bad"))
        stats = await engine.stats()
        assert stats.requests_running == stats.requests_waiting == 0

    run(config, scenario)


def test_a_request_id_in_use_is_refused_and_the_first_goes_on(config: EngineConfig) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=60, **GREEDY)
        first = asyncio.create_task(collect(engine.generate([1], params, "same")))
        await asyncio.sleep(0.1)
        with pytest.raises(RequestError, match="'same' is in use"):
            await collect(engine.generate([1], params, "same"))
        assert (await first)[-1].finish_reason is FinishReason.LENGTH

    run(config, scenario)


@pytest.mark.parametrize("how", ["close", "cancel", "abort"])
def test_leaving_early_frees_the_slots(config: EngineConfig, how: str) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        outputs = engine.generate([1, 2], SamplingParams(max_tokens=500, **GREEDY), "leaver")
        await anext(outputs)
        if how == "close":
            await outputs.aclose()  # type: ignore[attr-defined]
        elif how == "cancel":
            task = asyncio.create_task(collect(outputs))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await engine.abort("leaver")
            assert (await collect(outputs))[-1].finish_reason is FinishReason.ABORT
        stats = await engine.stats()
        assert stats.requests_running == 0
        assert stats.host_pool_live_slots == stats.device_pool_live_slots == 0

    run(config, scenario)


def test_drain_waits_for_running_requests(config: EngineConfig) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=10, **GREEDY)
        task = asyncio.create_task(collect(engine.generate([1], params, "last")))
        await asyncio.sleep(0.05)
        assert await engine.drain(30)
        assert not engine.is_ready
        assert (await task)[-1].finish_reason is FinishReason.LENGTH

    run(config, scenario)


def test_drain_says_when_the_time_was_too_short(config: EngineConfig) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=500, **GREEDY)
        task = asyncio.create_task(collect(engine.generate([1], params, "long")))
        await asyncio.sleep(0.1)
        assert not await engine.drain(0.1)
        engine.stop()
        with pytest.raises(EngineDeadError, match="stopped"):
            await task
        with pytest.raises(EngineDeadError, match="stopped"):
            await engine.stats()

    run(config, scenario)


def test_a_failing_engine_ends_every_request_and_takes_no_more(config: EngineConfig) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=500, **GREEDY)
        tasks = [
            asyncio.create_task(collect(engine.generate([1], params, f"r{index}")))
            for index in range(3)
        ]
        await asyncio.sleep(0.1)

        def broken() -> list[RequestOutput]:
            raise ValueError("a fault of ours")

        engine.engine.step = broken  # type: ignore[method-assign]
        for task in tasks:
            with pytest.raises(EngineDeadError, match="a fault of ours"):
                await task
        with pytest.raises(EngineDeadError):
            await collect(engine.generate([1], params, "late"))
        assert engine.phase == "failed" and not engine.is_ready

    run(config, scenario)


def test_a_start_that_fails_raises_the_reason(tmp_path: Path) -> None:
    engine = AsyncEngine(EngineConfig(model=str(tmp_path)))
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        asyncio.run(engine.start())
    assert engine.phase == "failed"
    engine.stop()
