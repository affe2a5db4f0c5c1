"""The shipped checkpoint: what transformers makes of it, and that it finds what it is asked for."""

import json
from pathlib import Path

import pytest
import torch
from tests.e2e.harness import make_engine
from tests.models.harness import Oracle, Runner

from echokv.bench.tasks import make_task
from echokv.engine.engine import Engine
from echokv.engine.sampling_params import SamplingParams

CHECKPOINT = Path(__file__).parents[2] / "examples" / "demo_model" / "checkpoint"
POOL_ROWS = 512
TOLERANCE = 1e-3


def ask(engine: Engine, prompt: str, max_tokens: int) -> str:
    ids = engine.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    (outputs,) = engine.generate([ids], SamplingParams(temperature=0, max_tokens=max_tokens))
    return "".join(output.text for output in outputs)


def instance(engine: Engine, task: str, tokens: int, seed: int) -> tuple[str, str]:
    return make_task(task, tokens, lambda text: len(engine.tokenizer.encode(text, False)), seed)


@pytest.fixture(scope="module")
def offloaded() -> Engine:
    engine, _ = make_engine(
        CHECKPOINT,
        observe=False,
        device_pool_tokens=POOL_ROWS,
        max_model_len=2560,
        host_pool_gib=0.05,
        max_num_seqs=1,
        dtype="float32",
    )
    return engine


def test_it_is_small_enough_to_ship() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 20_000_000


def test_logits_are_those_of_transformers(offloaded: Engine) -> None:
    prompt, _ = instance(offloaded, "kv_names", 500, 1)
    ids = offloaded.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    assert len(ids) > 1.5 * 256  # sparse: index_topk is 256
    expected = Oracle(CHECKPOINT).logits("a", ids)
    logits = Runner(CHECKPOINT, pool_tokens=POOL_ROWS).prefill("a", ids)
    assert (logits - expected).abs().max() <= TOLERANCE
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_it_finds_a_passkey_with_a_quarter_of_the_document_in_the_device_pool(
    offloaded: Engine,
) -> None:
    prompt, passkey = instance(offloaded, "passkey", 2000, 4)
    assert ask(offloaded, prompt, 8) == passkey
    assert min(layer.evicted_rows for layer in offloaded.stats().layers) > 1000


def test_the_model_card_has_the_last_evaluation() -> None:
    lines = (CHECKPOINT.parent / "eval.jsonl").read_text().splitlines()
    measured = json.loads(lines[-1])["exact_match"]
    card = (CHECKPOINT / "README.md").read_text()
    for task in ("passkey", "kv_uuid", "variables", "sorting"):
        row = next(line for line in card.splitlines() if line.startswith(f"| `{task}`"))
        cells = [float(cell) for cell in row.strip("| ").split("|")[1:]]
        expected = [measured[f"{task}/{length}"] for length in (1024, 4096, 8192, 16000)]
        assert cells == pytest.approx(expected, abs=0.005)
    assert all(measured[f"{task}/8192"] >= 0.9 for task in ("passkey", "kv_names", "kv_uuid"))
