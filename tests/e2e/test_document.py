"""A long real document through /v1/completions with the device pool at an eighth of its tokens.

`make test` runs it with 6,000 tokens; README names the command for the full length.
"""

from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tests.e2e.harness import SelectionLog, host_pool_gib, make_engine, python_sources, tokens_of
from tests.serving import served

from echokv.config import EngineConfig
from echokv.engine.async_engine import AsyncEngine
from echokv.engine.build import EngineHooks
from echokv.engine.sampling_params import SamplingParams

OUTPUT_TOKENS = 24


@pytest.mark.timeout(1200)
def test_an_offloaded_document_gives_the_tokens_and_sets_of_the_resident_run(
    demo_model: Path, document_tokens: int
) -> None:
    common: dict[str, Any] = {"max_model_len": document_tokens + 64, "max_num_seqs": 2}
    text = python_sources(document_tokens - 1)  # a byte a token, and the beginning of sequence
    resident, expected = make_engine(
        demo_model, offload=False, device_pool_tokens=document_tokens + 128, **common
    )
    prompt = resident.tokenizer.encode(text)
    assert len(prompt) >= document_tokens - 3
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    resident.add_request("document", prompt, params)
    outputs = []
    while resident.has_work:
        outputs += resident.step()
    resident.close()

    log = SelectionLog()
    engine = AsyncEngine(
        EngineConfig(
            model=str(demo_model),
            host_pool_gib=host_pool_gib(demo_model, document_tokens // 64 + 3),
            device_pool_tokens=document_tokens // 8,
            **common,
        ),
        hooks=EngineHooks(observer=log),
    )
    with served(engine) as url, OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        log.engine = engine.engine
        answer = client.completions.create(
            model=engine.model_name,
            prompt=prompt,
            max_tokens=OUTPUT_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        stats = engine.engine.stats()
    assert answer.usage is not None and answer.usage.completion_tokens == OUTPUT_TOKENS
    assert answer.choices[0].text == "".join(output.text for output in outputs)
    (request_id,) = {name for name, _, _ in log.selections}
    generated = [log.inputs[request_id, len(prompt) + n] for n in range(OUTPUT_TOKENS - 1)]
    assert generated == tokens_of(outputs)[:-1]
    assert log.of(request_id) == expected.of("document")
    assert len(log.selections) == 3 * (len(prompt) + OUTPUT_TOKENS - 1)
    for layer in stats.layers:
        assert layer.evicted_rows > document_tokens // 2
        assert layer.resident_rows <= document_tokens // 8
