"""Turns every `auto` of an EngineConfig into a decision, once, for this machine and model."""

import dataclasses

import torch

from echokv.config import EngineConfig, ModelConfig
from echokv.errors import ConfigError
from echokv.kernels.prefetch_args import FUSED_HEAD_DIM, FUSED_HEADS
from echokv.kernels.registry import auto_backend
from echokv.memory.formats import FP8_GROUP
from echokv.memory.pools import HOST_MEMORY_KINDS, host_memory_kind

_DTYPES = ("float32", "bfloat16")
_FP8_CAPABILITY = (8, 9)
_FP8_BLOCK = (128, 128)

_PREFETCH = ("auto", "on", "decode", "off")


def resolve(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """The same config with device, backend, dtypes and max_model_len decided.

    Raises:
        ConfigError: a value that this machine or model can't honour, with the flag to change.
    """
    device = _device(config)
    dtype = _dtype(config, device)
    backend = _backend(config, device)
    kv_cache_dtype = _kv_cache_dtype(config, model, device, dtype)
    index_key_dtype = _index_key_dtype(config, kv_cache_dtype, dtype)
    return dataclasses.replace(
        config,
        device=device,
        backend=backend,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        index_key_dtype=index_key_dtype,
        host_memory=_host_memory(config, device),
        prefetch=_prefetch(
            config, moves_rows_while_scoring(config, model, backend, index_key_dtype)
        ),
        max_model_len=_max_model_len(config, model),
    )


def fp8_refusal(config: EngineConfig, model: ModelConfig) -> str | None:
    """Why fp8 weights can't be kept as the checkpoint stores them; None when they are.

    Args:
        config: resolved.
        model: the checkpoint's.
    """
    reasons = {
        "the checkpoint has none": model.quant_block_size is None,
        f"its blocks are {model.quant_block_size}, not 128 x 128": (
            model.quant_block_size != _FP8_BLOCK
        ),
        "--gemm-kernel is torch": config.gemm_kernel == "torch",
        f"--device is {config.device}": config.device != "cuda",
        "--backend is reference": config.backend == "reference",
        f"--dtype is {config.dtype}": config.dtype != "bfloat16",
    }
    reason = next((words for words, holds in reasons.items() if holds), None)
    if reason is None and torch.cuda.get_device_capability() < _FP8_CAPABILITY:
        return "the GPU multiplies no fp8 (compute capability 8.9 or above)"
    return reason


def _device(config: EngineConfig) -> str:
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if config.device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {config.device!r} is not one of auto, cpu, cuda")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch sees no CUDA device on this machine")
    return config.device


def _backend(config: EngineConfig, device: str) -> str:
    if config.backend != "auto":
        return config.backend
    return auto_backend(torch.device(device))


def _dtype(config: EngineConfig, device: str) -> str:
    if config.dtype == "auto":
        return "bfloat16" if device == "cuda" else "float32"
    if config.dtype not in _DTYPES:
        raise ConfigError(f"--dtype {config.dtype!r} is not one of auto, {', '.join(_DTYPES)}")
    return config.dtype


def _kv_cache_dtype(config: EngineConfig, model: ModelConfig, device: str, dtype: str) -> str:
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype
    fp8 = device == "cuda" and torch.cuda.get_device_capability() >= _FP8_CAPABILITY
    if fp8 and dtype == "bfloat16" and model.kv_lora_rank % FP8_GROUP == 0:
        return "fp8_ds_mla"
    return dtype


def _index_key_dtype(config: EngineConfig, kv_cache_dtype: str, dtype: str) -> str:
    if config.index_key_dtype != "auto":
        return config.index_key_dtype
    return "fp8" if kv_cache_dtype == "fp8_ds_mla" else dtype


def moves_rows_while_scoring(
    config: EngineConfig, model: ModelConfig, backend: str, index_key_dtype: str
) -> bool:
    """Whether rows can move while scores are made, which is where prefetch pays in decode steps.

    Op by op, as elsewhere, it costs more launches than it hides (docs/prefetch.md).

    Args:
        config: `indexer_kernel` is used.
        model: the checkpoint's.
        backend: decided.
        index_key_dtype: decided.
    """
    return (
        backend == "cuda"
        and config.indexer_kernel != "deepgemm"
        and index_key_dtype == "fp8"
        and model.index_head_dim == FUSED_HEAD_DIM
        and model.index_n_heads in FUSED_HEADS
    )


def _prefetch(config: EngineConfig, pays: bool) -> str:
    if config.prefetch not in _PREFETCH:
        raise ConfigError(f"--prefetch {config.prefetch!r} is not one of {', '.join(_PREFETCH)}")
    if config.prefetch in ("on", "decode") and not config.offload:
        raise ConfigError(
            f"--prefetch {config.prefetch} contradicts --no-offload, which has nothing to fetch"
        )
    if config.prefetch != "auto":
        return config.prefetch
    # Prefill passes lose as much where nothing is missing as they gain elsewhere: prefetch.md.
    return "decode" if config.offload and pays else "off"


def _host_memory(config: EngineConfig, device: str) -> str:
    if config.host_memory not in HOST_MEMORY_KINDS:
        raise ConfigError(
            f"--host-memory {config.host_memory!r} is not one of {', '.join(HOST_MEMORY_KINDS)}"
        )
    if not config.offload and config.host_memory != "auto":
        raise ConfigError(
            f"--host-memory {config.host_memory} contradicts --no-offload, which has no host pool"
        )
    if not config.offload or device == "cpu":
        return config.host_memory
    return host_memory_kind(config.host_memory, torch.device(device))


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    limit = model.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} exceeds the model's"
            f" max_position_embeddings {limit}"
        )
    return config.max_model_len
