"""The demo checkpoint: what Hugging Face makes of it, and that its output is worth looking at."""

import hashlib
import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.models.harness import Runner
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV32ForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from echokv.config import ModelConfig
from echokv.errors import CheckpointError
from echokv.models.byte_tokenizer import SPECIAL_TOKENS, TOKEN_IDS, VOCAB_SIZE, build_tokenizer
from echokv.models.random_checkpoint import write_random_checkpoint

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "index_n_heads": 2, "q_lora_rank": 32}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def tokenizer(demo: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo)


def digests(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}


def test_hf_loads_every_weight(demo: Path) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(demo, output_loading_info=True)
    assert type(model) is DeepseekV32ForCausalLM
    assert not any(info.values()), info
    assert model.config.rope_parameters["rope_type"] == "yarn"
    assert model.model.layers[1].self_attn.scaling == pytest.approx(
        ModelConfig.from_dir(demo).softmax_scale, rel=1e-6
    )
    generation = GenerationConfig.from_pretrained(demo)
    assert generation.eos_token_id == TOKEN_IDS["<|eos|>"]


def test_it_is_small_and_sharded(demo: Path) -> None:
    assert sum(file.stat().st_size for file in demo.iterdir()) < 20e6
    index = json.loads((demo / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in index["weight_map"]


def test_the_seed_decides_every_byte(tmp_path: Path) -> None:
    first = digests(write_random_checkpoint(tmp_path / "a", seed=5, **TINY))
    again = digests(write_random_checkpoint(tmp_path / "b", seed=5, **TINY))
    other = digests(write_random_checkpoint(tmp_path / "c", seed=6, **TINY))
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {
        name for name in first if name.endswith(".safetensors")
    }


def test_overrides_are_checked_like_any_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="GPT2"):
        write_random_checkpoint(tmp_path, architectures=["GPT2"])
    with pytest.raises(CheckpointError, match="hidden_size"):
        write_random_checkpoint(tmp_path, hidden_size=None)


def test_greedy_output_varies_and_has_no_special_tokens(demo: Path) -> None:
    runner = Runner(demo)
    prompt = [TOKEN_IDS["<|bos|>"], *b"The quick brown fox jumps over the lazy dog. " * 3]
    logits = [runner.prefill("a", prompt)[-1]]
    output: list[int] = []
    for _ in range(80):
        output.append(int(logits[-1].argmax()))
        logits.append(runner.logits(("a", [output[-1]]))[-1])
    assert len(set(output)) > 40
    assert len(set(itertools.pairwise(output))) > 60  # no loop
    assert max(output) < 256
    probabilities = torch.stack(logits).softmax(-1)
    assert 0.1 < probabilities.amax(-1).mean() < 0.9
    assert 1e-6 < probabilities[:, TOKEN_IDS["<|eos|>"]].mean() < 1e-2
    others = [TOKEN_IDS[token] for token in SPECIAL_TOKENS if token != "<|eos|>"]
    assert probabilities[:, others].max() < 1e-9


def test_the_indexer_chooses_and_does_not_merely_take_the_latest(demo: Path) -> None:
    runner = Runner(demo)
    generator = torch.Generator().manual_seed(0)
    runner.prefill("a", torch.randint(0, 256, (256,), generator=generator).tolist())
    for layer in range(4):
        chosen = torch.tensor(runner.selected["a", layer, 255])
        assert chosen.shape == (64,)
        latest = (chosen >= 256 - 64).float().mean()
        assert 0.1 < latest < 0.6
        assert runner.selected["a", layer, 255] != runner.selected["a", layer, 254]


# The tokenizer


def test_ids_are_bytes_then_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == VOCAB_SIZE == 262
    assert tokenizer.convert_ids_to_tokens(list(range(256, 262))) == list(SPECIAL_TOKENS)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        256,
        257,
        261,
    )
    assert set(tokenizer.all_special_ids) == set(range(256, 262))


def test_encoding_puts_bos_first(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.encode("hé") == [256, *"hé".encode()]
    assert tokenizer.encode("") == [256]
    assert tokenizer.encode("<|user|>x", add_special_tokens=False) == [258, ord("x")]


FAST = build_tokenizer()


@given(st.text())
def test_text_is_its_utf8_bytes(text: str) -> None:
    if any(token in text for token in SPECIAL_TOKENS):
        return
    ids = FAST.encode(text, add_special_tokens=False).ids
    assert ids == list(text.encode())
    assert FAST.decode(ids) == text


@given(st.binary())
def test_every_byte_string_has_its_ids(data: bytes) -> None:
    """What is not UTF-8 comes back as replacement characters, as Python decodes it."""
    assert FAST.decode(list(data)) == data.decode(errors="replace")


def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|>Be kind.<|end_of_turn|><|user|>Hi<|end_of_turn|><|assistant|>Hello<|end_of_turn|>"
        "<|user|>Bye<|end_of_turn|><|assistant|>"
    )
    ids = tokenizer.apply_chat_template(turns[1:2], add_generation_prompt=True)["input_ids"]
    assert ids == [256, 258, *b"Hi", 260, 259]
