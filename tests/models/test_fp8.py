"""Block-fp8 weights kept as stored, against the same weights converted when they are loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from echokv.config import ModelConfig
from echokv.errors import CheckpointError
from echokv.kernels.registry import load_kernels
from echokv.models.deepseek_v32 import DeepseekV32
from echokv.models.fp8 import Fp8Experts, Fp8GatedMLP, Fp8Linear
from echokv.models.layers import Linear
from echokv.models.matrices import Matrices
from echokv.models.random_checkpoint import write_random_checkpoint
from echokv.models.registry import load_model, weight_bytes
from echokv.models.weights import checkpoint_places, fp8_weights

CPU = torch.device("cpu")
QUANTISED: dict[str, Any] = {
    "num_hidden_layers": 2,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("fp8"), num_shards=1, **QUANTISED)


def kept(path: Path, **changed: Any) -> Matrices:
    stored = fp8_weights(path)
    return Matrices(
        dtype=torch.bfloat16,
        keep_fp8=True,
        kernels=load_kernels("reference", CPU),
        is_fp8=changed.get("is_fp8", stored.__contains__),
    )


def load(path: Path, matrices: Matrices) -> DeepseekV32:
    return load_model(path, ModelConfig.from_dir(path), matrices, CPU)


def tensors(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model-00001-of-00001.safetensors")


def test_what_deepseek_stores_in_fp8_stays_so(checkpoint: Path) -> None:
    model = load(checkpoint, kept(checkpoint))
    attention, moe = model.layers[1].self_attn, model.layers[1].mlp
    for matrix in (attention.q_b_proj, attention.o_proj, attention.indexer.wq_b):
        assert isinstance(matrix, Fp8Linear)
    for part in ("q_a_proj", "kv_a_proj_with_mqa", "indexer.wk"):
        assert attention.from_hidden.parts()[f"{part}.weight"].dtype == torch.float8_e4m3fn
    assert isinstance(model.layers[0].mlp, Fp8GatedMLP)
    assert isinstance(moe.shared_experts, Fp8GatedMLP)
    assert isinstance(moe.experts, Fp8Experts)
    assert isinstance(model.lm_head, Linear)
    assert attention.kv_b_proj.weight.dtype == torch.bfloat16
    assert moe.gate.weight.dtype == attention.indexer.weights_proj.weight.dtype == torch.float32


def test_every_stored_byte_lands_in_its_place(checkpoint: Path) -> None:
    model, stored = load(checkpoint, kept(checkpoint)), tensors(checkpoint)
    places = checkpoint_places(model)
    kv_b = [name for name in stored if "kv_b_proj" in name]
    assert set(places) == set(stored) - {name for name in kv_b if name.endswith("_scale_inv")}
    for name in set(places) - set(kv_b):
        wide = torch.float32 if places[name].dtype == torch.float32 else None
        assert torch.equal(
            places[name].contiguous().view(torch.uint8),
            stored[name].to(wide or stored[name].dtype).view(torch.uint8),
        ), name
    assert torch.equal(model.layers[1].mlp.experts.gate_up_proj[2, 128:].view(torch.uint8),
                       stored[EXPERT].view(torch.uint8))  # fmt: skip


def test_weight_bytes_are_what_is_allocated(checkpoint: Path) -> None:
    model = load(checkpoint, kept(checkpoint))
    config, stored = ModelConfig.from_dir(checkpoint), fp8_weights(checkpoint)
    counted = Matrices(dtype=torch.bfloat16, keep_fp8=True, is_fp8=stored.__contains__)
    assert weight_bytes(config, counted) == sum(p.nbytes for p in model.parameters())
    assert weight_bytes(config, counted) < weight_bytes(config, Matrices(dtype=torch.bfloat16))


def whole(result: Tensor | list[Tensor]) -> Tensor:
    """A module's result, joined parts in one."""
    return torch.cat(result, -1) if isinstance(result, list) else result


@pytest.mark.parametrize("tokens", [1, 33])
def test_modules_compute_what_the_converted_ones_do(checkpoint: Path, tokens: int) -> None:
    """Within what rounding activations to e4m3 costs: 2 ** -4 of a value, averaged over a sum."""
    ours, wide = load(checkpoint, kept(checkpoint)), load(checkpoint, Matrices(dtype=torch.float32))
    x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(3))
    for name in ("layers.0.mlp", "layers.1.mlp", "layers.1.self_attn.from_hidden"):
        exact = whole(wide.get_submodule(name)(x))
        got = whole(ours.get_submodule(name)(x.bfloat16())).float()
        assert (got - exact).norm() < 0.06 * exact.norm(), name


def test_a_matrix_that_is_not_in_fp8_stays_as_it_is(checkpoint: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    copy_changed(checkpoint, tmp_path, name)
    model = load(tmp_path, kept(tmp_path))
    assert isinstance(model.layers[0].self_attn.o_proj, Linear)
    assert isinstance(model.layers[1].self_attn.o_proj, Fp8Linear)


def test_experts_of_two_kinds_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    copy_changed(checkpoint, tmp_path, EXPERT)
    with pytest.raises(
        CheckpointError, match=r"experts.2.up_proj.weight has dtype BF16, the other"
    ):
        load(tmp_path, kept(tmp_path))
    load(tmp_path, Matrices(dtype=torch.bfloat16))


def copy_changed(source: Path, target: Path, name: str) -> None:
    """The checkpoint with one matrix in bfloat16 instead of fp8."""
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    changed = tensors(source)
    changed[name] = changed[name].to(torch.bfloat16)
    del changed[name + "_scale_inv"]
    save_file(changed, target / "model.safetensors")
    (target / "model.safetensors.index.json").unlink()
