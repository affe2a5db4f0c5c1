"""Models to measure decoding with: real shapes, random weights, no checkpoint on disk.

Knows `config.json` dictionaries and how to fill a model's weights where it stands; nothing of
pools or requests.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echokv.config import EngineConfig, ModelConfig
from echokv.engine.resolve import fp8_refusal
from echokv.errors import ConfigError
from echokv.kernels.protocol import Kernels
from echokv.log import progress
from echokv.models.byte_tokenizer import write_tokenizer
from echokv.models.deepseek_v32 import DeepseekV32
from echokv.models.matrices import Matrices
from echokv.models.random_checkpoint import CONFIG as SMALL
from echokv.models.registry import build_model

_V32: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""DeepSeek-V3.2's `config.json` (huggingface.co/deepseek-ai/DeepSeek-V3.2-Exp)."""

PRESETS: dict[str, dict[str, Any]] = {
    # One GPU of eight: attention is data-parallel, so all heads; experts are split, so an eighth.
    # A token still chooses 8: what eight ranks of such a batch send to each rank on average.
    "deepseek-v3.2-dp8-slice": _V32 | {"n_routed_experts": 32},
    "small": SMALL,
}
"""Name -> `config.json`. "small" is the random demo checkpoint's, for machines without a GPU."""


def preset_config(
    name: str,
    *,
    num_layers: int | None = None,
    dense_layers: int | None = None,
    num_experts: int | None = None,
    weights: str = "bf16",
) -> dict[str, Any]:
    """A preset's `config.json` with some sizes replaced.

    Args:
        name: one of PRESETS.
        num_layers: decoder layers; None: the preset's.
        dense_layers: leading layers without experts; None: the preset's.
        num_experts: routed experts a layer; None: the preset's.
        weights: "bf16", or "fp8" for e4m3 in blocks of 128 x 128, as V3.2's checkpoint has it.

    Raises:
        ConfigError: an unknown name, or sizes that make no model.
    """
    if name not in PRESETS:
        raise ConfigError(f"--preset {name!r} is not one of {', '.join(PRESETS)}")
    raw = dict(PRESETS[name])
    if num_layers is not None:
        if num_layers < 1:
            raise ConfigError(f"--num-layers must be at least 1, got {num_layers}")
        raw["num_hidden_layers"] = num_layers
    if dense_layers is not None:
        if not 0 <= dense_layers <= raw["num_hidden_layers"]:
            raise ConfigError(
                f"--dense-layers {dense_layers} is not within the"
                f" {raw['num_hidden_layers']} layers (--num-layers)"
            )
        raw["first_k_dense_replace"] = dense_layers
    if num_experts is not None:
        _check_experts(num_experts, raw)
        raw["n_routed_experts"] = num_experts
    if weights == "fp8":
        raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return raw


def _check_experts(experts: int, raw: dict[str, Any]) -> None:
    groups, chosen = raw["n_group"], raw["num_experts_per_tok"]
    eligible = raw["topk_group"] * (experts // groups)
    if experts < 1 or experts % groups or experts // groups < 2 or eligible < chosen:
        raise ConfigError(
            f"--num-experts {experts}: the router needs {groups} equal groups of two or more, and"
            f" {chosen} experts within {raw['topk_group']} of them"
        )


def write_preset(directory: Path, raw: dict[str, Any]) -> Path:
    """Write what an engine reads besides weights: config.json and a byte tokenizer.

    Returns:
        the directory, for `EngineConfig.model`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    write_tokenizer(directory, raw["max_position_embeddings"])
    return directory


@torch.inference_mode()
def random_model(
    config: ModelConfig, engine: EngineConfig, device: torch.device, kernels: Kernels
) -> DeepseekV32:
    """A model with random weights, made on its device.

    Matrices keep the size of what they multiply, so that activations stay finite through any
    number of layers; norms are near one.

    Args:
        config: shapes, and whether weights are in block fp8.
        engine: resolved; its seed is the weights'. The same seed on another device gives others.
        device: where.
        kernels: the backend that will run it.

    Raises:
        ConfigError: fp8 weights that this engine can't keep.
    """
    refusal = None if config.quant_block_size is None else fp8_refusal(engine, config)
    if refusal is not None:
        raise ConfigError(f"--weights fp8: {refusal}")
    matrices = Matrices(
        dtype=getattr(torch, engine.dtype),
        token_tile=kernels.token_tile,
        keep_fp8=config.quant_block_size is not None,
        kernels=kernels,
        ops=kernels,
    )
    model = build_model(config, matrices, device)
    generator = torch.Generator(device).manual_seed(engine.seed)
    parameters = list(model.named_parameters())
    for name, parameter in progress(
        parameters, total=len(parameters), what="random weights", unit="tensor"
    ):
        _fill(name, parameter, generator)
    return model


_FP8_SPREAD = 64.0
"""Standard deviation of fp8 weights before their scale: seven of them fit e4m3's range."""


def _fill(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if name.endswith("norm.weight"):
        parameter.normal_(1.0, 0.1, generator=generator)
    elif parameter.dim() == 1:
        parameter.normal_(0.0, 0.1, generator=generator)
    elif parameter.dtype == torch.float8_e4m3fn:
        for matrix in parameter if parameter.dim() == 3 else (parameter,):
            noise = torch.empty(matrix.shape, dtype=torch.bfloat16, device=matrix.device)
            matrix.copy_(noise.normal_(0.0, _FP8_SPREAD, generator=generator))
    elif name.endswith(("_scale", "scale_inv")):  # one a block of 128 x 128
        parameter.uniform_(0.5, 1.0, generator=generator)
        parameter.mul_(_scale(name, parameter.shape[-1] * 128) / _FP8_SPREAD)
    else:
        parameter.normal_(0.0, _scale(name, parameter.shape[-1]), generator=generator)


def _scale(name: str, fan_in: int) -> float:
    """Standard deviation; what is added to the residual stream stays small beside it."""
    if "embed_tokens" in name:
        return 1.0
    added = any(part in name for part in ("o_proj", "down_proj", "down_scale"))
    return float((0.3 if added else 1.0) * fan_in**-0.5)
