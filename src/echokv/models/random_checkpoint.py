"""A small random checkpoint as a full Hugging Face directory: for demos and for tests.

Seeded and made in seconds on a CPU. The scales are a compromise: with less gain the output falls
into loops that ignore the context, with more the network is so chaotic that float32 rounding alone
moves logits by 1e-4. One channel of the residual stream is constant; through it lm_head has a
bias, which keeps the special tokens out of the output and makes end-of-sequence rare.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from echokv.config import ModelConfig
from echokv.models.block_fp8 import quantise_blocks
from echokv.models.byte_tokenizer import BOS, EOS, PAD, TOKEN_IDS, VOCAB_SIZE, write_tokenizer
from echokv.models.checkpoint import INDEX_FILE
from echokv.models.matrices import Matrices
from echokv.models.registry import build_model
from echokv.models.weights import SCALE_SUFFIX, checkpoint_places

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": TOKEN_IDS[BOS],
    "eos_token_id": TOKEN_IDS[EOS],
    "torch_dtype": "bfloat16",
}
"""DeepSeek-V3.2's `config.json`, shrunk."""

BIAS_CHANNEL = 0
"""Residual channel that every token's embedding sets and no layer writes."""

_BIAS_CHANNEL_VALUE = 4.0


FP8_MATRICES = tuple(
    f"{name}.weight"
    for name in (
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "wq_b", "wk"),
        *("gate_proj", "up_proj", "down_proj"),
    )
)
"""What DeepSeek stores in fp8: not embeddings, lm_head, norms, router and index heads' weights."""


def write_random_checkpoint(
    path: str | Path, *, seed: int = 0, num_shards: int = 2, **config_overrides: Any
) -> Path:
    """Write config.json, weights in shards with an index, generation_config.json and a tokenizer.

    Args:
        path: directory to create, or to write into.
        seed: of the weights.
        num_shards: safetensors files.
        config_overrides: entries of `config.json` to replace; None removes one. `torch_dtype`
            (bfloat16, float32 or float16) is also what the weights are stored in.

    Returns:
        the directory.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    merged = {**CONFIG, **config_overrides}
    raw = {key: value for key, value in merged.items() if value is not None}
    _write_json(directory / "config.json", raw)
    _write_json(
        directory / "generation_config.json",
        {
            "bos_token_id": raw["bos_token_id"],
            "eos_token_id": raw["eos_token_id"],
            "pad_token_id": TOKEN_IDS[PAD],
            "do_sample": True,
            "temperature": 1.0,
        },
    )
    write_tokenizer(directory, raw["max_position_embeddings"])
    _write_shards(directory, random_weights(ModelConfig.from_dict(raw), seed), num_shards)
    return directory


def random_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """A seeded state dict in the checkpoint's names, shapes and dtypes.

    With `quant_block_size` (a `quantization_config` in config.json) the matrices that DeepSeek's
    checkpoints store in fp8 are in e4m3, each with its `weight_scale_inv`.

    Args:
        config: shapes; `torch_dtype` is the dtype of all but the router's correction bias.
        seed: of the generator.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.torch_dtype)
    meta = build_model(config, Matrices(dtype=torch.float32), torch.device("meta"))
    weights: dict[str, Tensor] = {}
    for name, place in checkpoint_places(meta).items():
        value = torch.randn(place.shape, generator=generator)
        value = _scaled(name, value)
        keep_wide = name.endswith("e_score_correction_bias")
        if config.quant_block_size is not None and name.endswith(FP8_MATRICES):
            weights[name], scales = quantise_blocks(value, config.quant_block_size)
            weights[name + SCALE_SUFFIX] = scales
        else:
            weights[name] = value if keep_wide else value.to(dtype)
    return weights


def _scaled(name: str, noise: Tensor) -> Tensor:
    """Standard normal noise to the weight of that name."""
    for suffix, scale in _SCALES.items():
        if name.endswith(suffix):
            return scale(noise)
    return _gain(1.0)(noise)


def _gain(gain: float) -> Callable[[Tensor], Tensor]:
    """Outputs about `gain` times as large as inputs."""
    return lambda noise: noise * (gain * noise.shape[-1] ** -0.5)


def _near_one(noise: Tensor) -> Tensor:
    return 1.0 + 0.1 * noise


def _embedding(noise: Tensor) -> Tensor:
    noise[:, BIAS_CHANNEL] = _BIAS_CHANNEL_VALUE
    return noise


def _to_residual(gain: float) -> Callable[[Tensor], Tensor]:
    def scale(noise: Tensor) -> Tensor:
        noise = _gain(gain)(noise)
        noise[BIAS_CHANNEL] = 0.0
        return noise

    return scale


def _head(noise: Tensor) -> Tensor:
    """Logits with a spread of about 2.5, the bias channel apart."""
    noise = _gain(2.5)(noise)
    noise[:, BIAS_CHANNEL] = 0.0
    for token, bias in _TOKEN_BIASES.items():
        if token < noise.shape[0]:  # a smaller vocabulary lacks some
            noise[token, BIAS_CHANNEL] = bias
    return noise


_TOKEN_BIASES = dict.fromkeys(TOKEN_IDS.values(), -20.0) | {TOKEN_IDS[EOS]: -1.0}

_SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "norm.weight": _near_one,
    "norm.bias": lambda noise: 0.1 * noise,
    "e_score_correction_bias": lambda noise: 0.05 * noise,
    "embed_tokens.weight": _embedding,
    "q_b_proj.weight": _gain(1.5),
    "o_proj.weight": _to_residual(0.7),
    "down_proj.weight": _to_residual(0.5),
    "lm_head.weight": _head,
}
"""By the end of the name, first match wins; everything else has gain 1."""


def _write_shards(directory: Path, weights: dict[str, Tensor], num_shards: int) -> None:
    weight_map: dict[str, str] = {}
    for number, names in enumerate(_split(list(weights), num_shards), start=1):
        file = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        shard = {name: weights[name].contiguous() for name in names}
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total = sum(weight.numel() * weight.element_size() for weight in weights.values())
    _write_json(
        directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def _split(names: list[str], parts: int) -> Iterator[list[str]]:
    step = -(-len(names) // parts)
    for part in range(parts):
        yield names[part * step : (part + 1) * step]


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
