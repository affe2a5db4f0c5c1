"""A block-fp8 checkpoint through the engine: its weights kept as stored, and converted."""

import logging
from pathlib import Path

import pytest
from tests.e2e.harness import make_engine, tokens_of

from echokv.engine import choices
from echokv.engine.sampling_params import SamplingParams
from echokv.models.random_checkpoint import write_random_checkpoint


def run(model: Path) -> tuple[list[int], int]:
    """Twelve greedy tokens, and the bytes of the weights."""
    engine, _ = make_engine(
        model, device="cpu", dtype="bfloat16", max_model_len=256, max_num_seqs=1,
        max_num_batched_tokens=64, host_pool_gib=0.01,
    )  # fmt: skip
    prompt = engine.tokenizer.encode("def main() -> None:")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tokens = tokens_of(engine.generate([prompt], params)[0])
    weights = next(line.nbytes for line in engine.plan.lines if line.name == "weights")
    engine.close()
    return tokens, weights


def test_weights_are_kept_where_they_can_be_and_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On the CPU the engine converts; the reference ops can multiply fp8 all the same.

    Rounding activations to e4m3 moves a random model's later choices, not its first.
    """
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write_random_checkpoint(tmp_path, num_hidden_layers=2, quantization_config=quantised)
    with caplog.at_level(logging.INFO, logger="echokv"):
        converted, wide_bytes = run(tmp_path)
        monkeypatch.setattr(choices, "fp8_refusal", lambda config, model: None)
        kept, fp8_bytes = run(tmp_path)
    assert "block-fp8 weights: converted to bfloat16: --device is cpu" in caplog.text
    assert "block-fp8 weights: kept as stored" in caplog.text
    assert fp8_bytes < 0.6 * wide_bytes
    assert len(kept) == 12 and kept[0] == converted[0]
