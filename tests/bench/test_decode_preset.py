"""Presets: the published shapes, sizes that can be replaced, and weights that stay finite."""

import json
from pathlib import Path

import pytest
import torch

from echokv.bench.decode_preset import PRESETS, preset_config, random_model, write_preset
from echokv.config import EngineConfig, ModelConfig
from echokv.engine.tokenizer import Tokenizer
from echokv.errors import ConfigError
from echokv.kernels.registry import load_kernels

CPU = torch.device("cpu")
SLICE = "deepseek-v3.2-dp8-slice"


def test_the_slice_is_an_eighth_of_the_published_model() -> None:
    config = ModelConfig.from_dict(preset_config(SLICE))
    assert config.num_hidden_layers == 61 and config.mlp_layer_types.count("dense") == 3
    assert config.n_routed_experts == 256 // 8 and config.num_experts_per_tok == 8
    assert (config.hidden_size, config.num_attention_heads) == (7168, 128)
    assert (config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim) == (1536, 512, 64)
    assert (config.index_n_heads, config.index_head_dim, config.index_topk) == (64, 128, 2048)
    assert config.rope.is_yarn and config.rope.softmax_mscale > 1
    assert config.max_position_embeddings == 163840


def test_sizes_can_be_replaced() -> None:
    raw = preset_config(SLICE, num_layers=10, dense_layers=10, num_experts=64)
    assert (raw["num_hidden_layers"], raw["n_routed_experts"]) == (10, 64)
    assert ModelConfig.from_dict(raw).mlp_layer_types == ("dense",) * 10
    assert PRESETS[SLICE]["num_hidden_layers"] == 61, "the preset itself stays"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_layers": 0}, "--num-layers must be at least 1"),
        ({"dense_layers": 62}, "--dense-layers 62 is not within the 61"),
        ({"num_experts": 12}, "--num-experts 12: the router needs 8 equal groups"),
        ({"num_experts": 8}, "--num-experts 8"),
    ],
)
def test_impossible_sizes(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preset_config(SLICE, **sizes)
    with pytest.raises(ConfigError, match="not one of"):
        preset_config("deepseek-v9")


def test_what_an_engine_reads(tmp_path: Path) -> None:
    raw = preset_config("small")
    directory = write_preset(tmp_path / "model", raw)
    assert json.loads((directory / "config.json").read_text()) == raw
    assert ModelConfig.from_dir(directory).index_topk == 64
    assert Tokenizer.from_dir(directory).encode("a")[-1] == ord("a")


def test_weights_are_random_and_finite() -> None:
    config = ModelConfig.from_dict(preset_config("small", num_layers=3))
    kernels = load_kernels("reference", CPU)

    def weights(seed: int) -> dict[str, torch.Tensor]:
        engine = EngineConfig(model="", device="cpu", dtype="float32", seed=seed)
        return dict(random_model(config, engine, CPU, kernels).named_parameters())

    first, again, other = weights(1), weights(1), weights(2)
    for name, weight in first.items():
        assert weight.isfinite().all() and weight.std() > 0, name
        assert torch.equal(weight, again[name]) and not torch.equal(weight, other[name])
