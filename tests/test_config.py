"""config.json and flags: what is read, what is refused and how."""

import json
from pathlib import Path
from typing import Any

import pytest

from echokv.config import EngineConfig, ModelConfig
from echokv.errors import CheckpointError, ConfigError
from echokv.models.random_checkpoint import CONFIG


def v32(**changes: Any) -> dict[str, Any]:
    return {**CONFIG, **changes}


def test_both_spellings_of_yarn_mean_the_same() -> None:
    old = ModelConfig.from_dict(v32())
    spec = {**CONFIG["rope_scaling"], "rope_type": "yarn", "rope_theta": 10000.0}
    del spec["type"]
    new = dict(v32(rope_parameters=spec))
    del new["rope_scaling"], new["rope_theta"]
    assert ModelConfig.from_dict(new) == old
    assert old.rope.is_yarn and old.rope.factor == 40


def test_yarn_squares_mscale_into_the_softmax_scale() -> None:
    config = ModelConfig.from_dict(v32())
    dim = CONFIG["qk_nope_head_dim"] + CONFIG["qk_rope_head_dim"]
    assert config.softmax_scale == pytest.approx(dim**-0.5 * 1.3688879454113936**2)
    plain = ModelConfig.from_dict(v32(rope_scaling=None))
    assert plain.softmax_scale == pytest.approx(dim**-0.5)


def test_index_layers_are_the_full_ones() -> None:
    types = ["full", "shared", "full", "shared"]
    assert ModelConfig.from_dict(v32(indexer_types=types)).index_layers == (0, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": None}, "unknown architecture"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, "indexer_types"),
        ({"indexer_types": ["full"]}, "1 entries"),
        ({"qk_rope_head_dim": 256}, "256"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "linear"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ],
)
def test_what_cannot_be_served_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        ModelConfig.from_dict(v32(**changes))


def test_a_missing_key_names_file_and_key(tmp_path: Path) -> None:
    raw = v32()
    del raw["kv_lora_rank"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"config\.json: missing key 'kv_lora_rank'"):
        ModelConfig.from_dir(tmp_path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens"),
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, "--max-num-batched-tokens 64"),
        ({"host_pool_gib": 0.0}, "--host-pool-gib"),
        ({"device_pool_tokens": -1}, "--device-pool-tokens"),
        ({"max_model_len": 0}, "--max-model-len"),
    ],
)
def test_a_bad_flag_is_named(values: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        EngineConfig(model="x", **values)
