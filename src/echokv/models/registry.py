"""From a checkpoint directory to a model ready to run."""

from pathlib import Path

import torch

from echokv.config import ModelConfig
from echokv.errors import CheckpointError
from echokv.models.deepseek_v32 import DeepseekV32
from echokv.models.weights import load_weights

MODELS: dict[str, type[DeepseekV32]] = {
    "DeepseekV32ForCausalLM": DeepseekV32,
    "GlmMoeDsaForCausalLM": DeepseekV32,  # same modules; ModelConfig says what differs
}
"""HF architecture -> the class that runs it."""

COMPUTE_DTYPES = (torch.float32, torch.bfloat16)


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    token_tile: int | None,
) -> DeepseekV32:
    """A model without weights; on the meta device it costs nothing (for the byte plan).

    Args:
        config: the checkpoint's.
        dtype: compute dtype.
        device: where weights will live.
        token_tile: `Kernels.token_tile`.

    Raises:
        CheckpointError: an architecture that has no model here.
        ValueError: a dtype that models don't compute in.
    """
    if config.architecture not in MODELS:
        raise CheckpointError(
            f"unknown architecture {config.architecture!r}; echokv serves {', '.join(MODELS)}"
        )
    if dtype not in COMPUTE_DTYPES:
        raise ValueError(f"models compute in float32 or bfloat16, not {dtype}")
    return MODELS[config.architecture](config, dtype, device, token_tile)


def load_model(
    path: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    token_tile: int | None,
) -> DeepseekV32:
    """Build a model and fill it from its checkpoint; arguments and errors as the two steps'."""
    model = build_model(config, dtype=dtype, device=device, token_tile=token_tile)
    load_weights(model, path)
    return model


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that the weights of a model take on its device."""
    model = build_model(config, dtype=dtype, device=torch.device("meta"), token_tile=None)
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
