"""The checkpoint loader: what it accepts, and what it says of a broken checkpoint."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from echokv.config import ModelConfig
from echokv.errors import CheckpointError
from echokv.models import block_fp8
from echokv.models.deepseek_v32 import DeepseekV32
from echokv.models.matrices import Matrices
from echokv.models.random_checkpoint import write_random_checkpoint
from echokv.models.registry import build_model, load_model, weight_bytes
from echokv.models.weights import checkpoint_places

CPU = torch.device("cpu")
TINY = {
    "hidden_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "q_lora_rank": 40,
    "kv_lora_rank": 56,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "intermediate_size": 50,
    "moe_intermediate_size": 30,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "vocab_size": 262,
    "torch_dtype": "float32",
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
KV_B = "model.layers.0.self_attn.kv_b_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("tiny"), seed=1, **TINY)


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path, dirs_exist_ok=True)
    return tmp_path


def load(path: Path, dtype: torch.dtype = torch.float32) -> DeepseekV32:
    config = ModelConfig.from_dir(path)
    return load_model(path, config, Matrices(dtype=dtype, token_tile=32), CPU)


def state(path: Path) -> dict[str, Tensor]:
    return load_file(path / SHARDS[0]) | load_file(path / SHARDS[1])


def shard_of(path: Path, name: str) -> Path:
    index = json.loads((path / "model.safetensors.index.json").read_text())
    return path / index["weight_map"][name]


def edit(path: Path, name: str, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the shard that holds `name`, and the index with it."""
    file = shard_of(path, name)
    tensors = load_file(file)
    before = set(tensors)
    change(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)
    index_file = path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    for key in before - set(tensors):
        del index["weight_map"][key]
    index["weight_map"] |= dict.fromkeys(tensors, file.name)
    index_file.write_text(json.dumps(index))


def fails(path: Path, *parts: str) -> None:
    """Loading raises a CheckpointError that has all the parts in its message."""
    with pytest.raises(CheckpointError) as error:
        load(path)
    for part in parts:
        assert part in str(error.value), f"{part!r} is not in {error.value}"


# What loads


def test_every_tensor_lands_in_its_place(checkpoint: Path) -> None:
    tensors, model = state(checkpoint), load(checkpoint)
    attention, moe = model.layers[0].self_attn, model.layers[1].mlp
    assert torch.equal(model.embed_tokens.weight, tensors["model.embed_tokens.weight"])
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    assert torch.equal(moe.experts.gate_up_proj[2, 30:], tensors[EXPERT])
    name = EXPERT.replace("up_proj", "gate_proj")
    assert torch.equal(moe.experts.gate_up_proj[2, :30], tensors[name])
    name = EXPERT.replace("up_proj", "down_proj")
    assert torch.equal(moe.experts.down_proj[2], tensors[name])
    assert torch.equal(attention.kv_b_proj.weight.view(3 * 44, 56), tensors[KV_B])
    places = checkpoint_places(model)
    assert set(places) == set(tensors)
    assert all(torch.equal(places[name], tensor) for name, tensor in tensors.items())


def test_absorption_is_kv_b_proj(checkpoint: Path) -> None:
    """Both halves: q . (W c) through the key half, and W c through the value half, per head."""
    expansion = load(checkpoint).layers[0].self_attn.kv_b_proj
    matrix = state(checkpoint)[KV_B].view(3, 44, 56).double()
    query, latent = torch.randn(5, 3, 24), torch.randn(5, 56)
    keys = torch.einsum("hnl,tl->thn", matrix[:, :24], latent.double())
    absorbed = torch.full((5, 3, 60), torch.nan)
    expansion.absorb(query, absorbed[..., :56])
    scores = torch.einsum("thl,tl->th", absorbed[..., :56].double(), latent.double())
    torch.testing.assert_close(scores, (query.double() * keys).sum(-1), rtol=1e-4, atol=1e-4)
    values = torch.einsum("hvl,tl->thv", matrix[:, 24:], latent.double())
    expanded = expansion.expand_values(latent[:, None].expand(-1, 3, -1).contiguous())
    torch.testing.assert_close(expanded.double(), values, rtol=1e-4, atol=1e-4)


def test_a_single_file_loads_too(checkpoint: Path) -> None:
    expected = load(checkpoint).state_dict()
    save_file(state(checkpoint), checkpoint / "model.safetensors")
    for name in (*SHARDS, "model.safetensors.index.json"):
        (checkpoint / name).unlink()
    loaded = load(checkpoint).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes_are_converted(checkpoint: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    def convert(tensors: dict[str, Tensor]) -> None:
        tensors |= {name: tensor.to(stored) for name, tensor in tensors.items()}

    edit(checkpoint, EXPERT, convert)
    model = load(checkpoint, dtype)
    expected = state(checkpoint)[EXPERT]
    assert expected.dtype == stored
    assert torch.equal(model.layers[1].mlp.experts.gate_up_proj[2, 30:], expected.to(dtype))
    assert model.norm.weight.dtype == torch.float32
    assert model.layers[1].mlp.gate.weight.dtype == torch.float32
    assert model.layers[1].self_attn.indexer.weights_proj.weight.dtype == torch.float32


def test_multi_token_prediction_layers_are_ignored(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.2.eh_proj.weight"] = torch.zeros(3)
        tensors["model.layers.2.mlp.gate_proj.weight_scale_inv"] = torch.zeros(3)

    edit(checkpoint, EXPERT, add)
    with caplog.at_level(logging.WARNING, "echokv"):
        load(checkpoint)
    assert not caplog.records


def test_unused_tensors_are_named_once(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.rotary_emb.inv_freq"] = torch.zeros(3)
        tensors["model.layers.0.something.weight"] = torch.zeros(3)

    edit(checkpoint, EXPERT, add)
    with caplog.at_level(logging.WARNING, "echokv"):
        load(checkpoint)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "model.layers.0.something.weight, model.rotary_emb.inv_freq" in caplog.text


def test_tied_embeddings_need_no_head(pristine: Path, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, seed=1, **TINY, tie_word_embeddings=True)
    model = load(tmp_path)
    assert "lm_head.weight" not in state(tmp_path)
    assert model.lm_head.weight is model.embed_tokens.weight


def test_weight_bytes_are_what_is_allocated(checkpoint: Path) -> None:
    config = ModelConfig.from_dir(checkpoint)
    for dtype in (torch.float32, torch.bfloat16):
        model = load(checkpoint, dtype)
        assert weight_bytes(config, Matrices(dtype=dtype)) == sum(
            p.nbytes for p in model.parameters()
        )


# Block fp8


def quantised(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """(e4m3 values, scales, what they stand for), block by block, in plain loops."""
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    meant = torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = weight[where].abs().max() / 448
            values[where] = (weight[where] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[where] = values[where].float() * scales[i, j]
    return values, scales, meant


def quantise_checkpoint(path: Path) -> dict[str, Tensor]:
    """Quantise all projections in blocks of 16 x 8; returns what they stand for."""
    meant: dict[str, Tensor] = {}

    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if name.endswith("_proj.weight") and "indexer" not in name:
                tensors[name], scales, meant[name] = quantised(tensors[name], 16, 8)
                tensors[f"{name}_scale_inv"] = scales

    edit(path, EXPERT, change)
    edit(path, KV_B, change)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 8]}
    (path / "config.json").write_text(json.dumps(config))
    return meant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("band", [1, 16 << 20], ids=["one block row", "all"])
def test_block_fp8_is_dequantised(
    checkpoint: Path, dtype: torch.dtype, band: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_fp8, "MAX_BAND_ELEMENTS", band)
    original, meant = state(checkpoint), quantise_checkpoint(checkpoint)
    assert {EXPERT, KV_B} <= set(meant)
    places = checkpoint_places(load(checkpoint, dtype))
    for name, tensor in original.items():
        expected = meant.get(name, tensor).to(places[name].dtype)
        assert torch.equal(places[name], expected), name
        if name in meant:
            error = (meant[name] - tensor).abs().max()
            assert 0 < error < 0.05 * tensor.abs().max()


def test_a_scale_may_be_in_another_shard(checkpoint: Path) -> None:
    meant = quantise_checkpoint(checkpoint)
    scale = f"{EXPERT}_scale_inv"
    moved: dict[str, Tensor] = {}
    edit(checkpoint, EXPERT, lambda tensors: moved.update({scale: tensors.pop(scale)}))
    other = next(name for name in state(checkpoint) if shard_of(checkpoint, name).name
                 != shard_of(checkpoint, EXPERT).name)  # fmt: skip
    edit(checkpoint, other, lambda tensors: tensors.update(moved))
    assert torch.equal(checkpoint_places(load(checkpoint))[EXPERT], meant[EXPERT])


# What does not load


def test_no_weights(checkpoint: Path) -> None:
    for name in (*SHARDS, "model.safetensors.index.json"):
        (checkpoint / name).unlink()
    fails(checkpoint, str(checkpoint), "model.safetensors", "model.safetensors.index.json")


def test_missing_shard(checkpoint: Path) -> None:
    there = load_file(checkpoint / SHARDS[1])
    (checkpoint / SHARDS[1]).unlink()
    fails(checkpoint, SHARDS[1], "does not exist", f"{len(there)} tensors", "model.layers.1.")


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_truncated_shard(checkpoint: Path, keep: int) -> None:
    content = (checkpoint / SHARDS[0]).read_bytes()[:keep]
    (checkpoint / SHARDS[0]).write_bytes(content)
    fails(checkpoint, SHARDS[0], f"{len(content)} bytes", "truncated or damaged")


@pytest.mark.parametrize("content", ["not json", "[]", "{}", '{"weight_map": {}}'])
def test_bad_index(checkpoint: Path, content: str) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(content)
    fails(checkpoint, "model.safetensors.index.json")


def test_index_that_names_the_wrong_shard(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["lm_head.weight"] = SHARDS[0]
    index["weight_map"]["model.norm.weight"] = SHARDS[1]
    file.write_text(json.dumps(index))
    fails(checkpoint, SHARDS[0], "lm_head.weight")


def test_missing_tensors(checkpoint: Path) -> None:
    edit(checkpoint, EXPERT, lambda tensors: tensors.pop(EXPERT))
    fails(checkpoint, str(checkpoint), "lacks 1 tensors", EXPERT)


@pytest.mark.parametrize("name", [EXPERT, KV_B, "lm_head.weight"])
def test_wrong_shape(checkpoint: Path, name: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.zeros(7, 5)

    right = list(state(checkpoint)[name].shape)
    edit(checkpoint, name, change)
    fails(checkpoint, shard_of(checkpoint, name).name, name, "[7, 5]", str(right))


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(torch.int64, "I64"), (torch.float64, "F64"), (torch.float8_e5m2, "F8_E5M2")],
)
def test_unsupported_dtype(checkpoint: Path, dtype: torch.dtype, stored: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[EXPERT] = tensors[EXPERT].to(dtype)

    edit(checkpoint, EXPERT, change)
    fails(checkpoint, shard_of(checkpoint, EXPERT).name, EXPERT, stored)


def test_fp8_without_quantization_config(checkpoint: Path) -> None:
    quantise_checkpoint(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    del config["quantization_config"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    fails(checkpoint, "F8_E4M3", "quantization_config")


def test_fp8_without_scale(checkpoint: Path) -> None:
    quantise_checkpoint(checkpoint)
    edit(checkpoint, KV_B, lambda tensors: tensors.pop(f"{KV_B}_scale_inv"))
    fails(checkpoint, shard_of(checkpoint, KV_B).name, KV_B, "no scale_inv")


def test_scale_of_the_wrong_shape(checkpoint: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{KV_B}_scale_inv"] = torch.ones(2, 2)

    quantise_checkpoint(checkpoint)
    edit(checkpoint, KV_B, change)
    fails(checkpoint, f"{KV_B}_scale_inv", "[2, 2]", "[132, 56]", "[16, 8]")


def test_scale_of_an_unquantised_weight(checkpoint: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{KV_B}_scale_inv"] = torch.ones(9, 7)

    edit(checkpoint, KV_B, change)
    fails(checkpoint, f"{KV_B}_scale_inv", "F32")


def test_scale_without_its_weight(checkpoint: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.ghost_proj.weight_scale_inv"] = torch.ones(1, 1)

    edit(checkpoint, KV_B, change)
    fails(checkpoint, "model.layers.0.mlp.ghost_proj.weight_scale_inv has no weight")


def test_bias_that_would_be_left_out(checkpoint: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.o_proj.bias"] = torch.ones(72)

    edit(checkpoint, KV_B, change)
    fails(checkpoint, shard_of(checkpoint, KV_B).name, "model.layers.0.self_attn.o_proj.bias")


def test_unknown_architecture(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    fails(checkpoint, "config.json", "LlamaForCausalLM", "DeepseekV32ForCausalLM")


def test_models_compute_in_two_dtypes(checkpoint: Path) -> None:
    config = ModelConfig.from_dir(checkpoint)
    with pytest.raises(ValueError, match=re.escape("float32 or bfloat16, not torch.float16")):
        build_model(config, Matrices(dtype=torch.float16), CPU)
