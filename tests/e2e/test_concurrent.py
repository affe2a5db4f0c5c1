"""Many clients at once, some of whom leave: the others' tokens don't change, no slot is lost."""

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import httpx2
from openai import AsyncOpenAI
from tests.e2e.harness import host_pool_gib, python_sources, tokens_of
from tests.serving import served

from echokv.config import EngineConfig
from echokv.engine.async_engine import AsyncEngine
from echokv.engine.engine import Engine
from echokv.engine.sampling_params import SamplingParams

REQUESTS = 100
MAX_LEN = 256


def make_requests(seed: int) -> list[dict[str, Any]]:
    """Mixed lengths, shared prefixes, greedy and seeded."""
    rng = random.Random(seed)
    text = python_sources(20_000)
    requests = []
    for index in range(REQUESTS):
        start = rng.choice([0, 0, 3000, rng.randrange(15_000)])
        requests.append(
            {
                "prompt": text[start : start + rng.choice([1, 30, 64, 65, 130, 180])],
                "max_tokens": rng.randint(1, 12),
                "temperature": rng.choice([0.0, 0.9]),
                "seed": index,
            }
        )
    return requests


def expected_texts(model: Path, requests: list[dict[str, Any]]) -> list[str]:
    """From an engine with everything resident, offline."""
    engine = Engine(
        EngineConfig(
            model=str(model), offload=False, device_pool_tokens=64 * MAX_LEN, max_model_len=MAX_LEN
        )
    )
    params = [
        SamplingParams(
            temperature=one["temperature"],
            seed=one["seed"],
            max_tokens=one["max_tokens"],
            ignore_eos=True,
        )
        for one in requests
    ]
    prompts = [engine.tokenizer.encode(one["prompt"]) for one in requests]
    outputs = engine.generate(prompts, params)
    engine.close()
    assert all(tokens_of(one) for one in outputs)
    return ["".join(output.text for output in one) for one in outputs]


async def ask(client: AsyncOpenAI, one: dict[str, Any], leave_after: int | None) -> str | None:
    """One streaming request; None when the client left after some chunks."""
    stream = await client.completions.create(
        model="demo", stream=True, extra_body={"ignore_eos": True}, **one
    )
    text = ""
    chunks = 0
    async for chunk in stream:
        chunks += 1
        if chunks == leave_after:
            await stream.close()
            return None
        text += "".join(choice.text for choice in chunk.choices)
    return text


async def ask_all(url: str, requests: list[dict[str, Any]], leavers: dict[int, int]) -> list[Any]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return await asyncio.gather(
            *(ask(client, one, leavers.get(index)) for index, one in enumerate(requests))
        )


def test_random_aborts_leave_both_pools_empty_and_survivors_untouched(demo_model: Path) -> None:
    requests = make_requests(seed=3)
    rng = random.Random(4)
    leavers = {index: rng.randint(1, 4) for index in rng.sample(range(REQUESTS), 30)}
    expected = expected_texts(demo_model, requests)
    engine = AsyncEngine(
        EngineConfig(
            model=str(demo_model),
            served_model_name="demo",
            host_pool_gib=host_pool_gib(demo_model, 40),
            device_pool_tokens=9 * 64,
            max_model_len=MAX_LEN,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            check_cache=True,
        )
    )
    with served(engine) as url:
        texts = asyncio.run(ask_all(url, requests, leavers))
        deadline = asyncio.run(wait_until_idle(url))
        assert deadline, "slots are still live"
    survivors = [index for index, text in enumerate(texts) if text is not None]
    assert len(survivors) >= REQUESTS - len(leavers)
    assert [texts[index] for index in survivors] == [expected[index] for index in survivors]


async def wait_until_idle(url: str) -> bool:
    """Whether the metrics show both pools without a live slot within a few seconds."""
    async with httpx2.AsyncClient(base_url=url) as client:
        for _ in range(100):
            text = (await client.get("/metrics")).text
            live = re.findall(r"^echokv:(?:host|device)_pool_live_slots\S* (\S+)$", text, re.M)
            running = re.findall(r"^echokv:num_requests_(?:running|waiting)\S* (\S+)$", text, re.M)
            assert len(live) == 2 and len(running) == 2
            if {float(value) for value in live + running} == {0.0}:
                return True
            await asyncio.sleep(0.1)
    return False
