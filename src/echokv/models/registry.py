"""From a checkpoint directory to a model ready to run."""

from pathlib import Path

import torch

from echokv.config import ModelConfig
from echokv.errors import CheckpointError
from echokv.models.deepseek_v32 import DeepseekV32
from echokv.models.matrices import Matrices
from echokv.models.weights import load_weights

MODELS: dict[str, type[DeepseekV32]] = {
    "DeepseekV32ForCausalLM": DeepseekV32,
    "GlmMoeDsaForCausalLM": DeepseekV32,  # same modules; ModelConfig says what differs
}
"""HF architecture -> the class that runs it."""

COMPUTE_DTYPES = (torch.float32, torch.bfloat16)


def build_model(config: ModelConfig, matrices: Matrices, device: torch.device) -> DeepseekV32:
    """A model without weights; on the meta device it costs nothing (for the byte plan).

    Args:
        config: the checkpoint's.
        matrices: how they are kept, and the compute dtype.
        device: where weights will live.

    Raises:
        CheckpointError: an architecture that has no model here.
        ValueError: a dtype that models don't compute in.
    """
    if config.architecture not in MODELS:
        raise CheckpointError(
            f"unknown architecture {config.architecture!r}; echokv serves {', '.join(MODELS)}"
        )
    if matrices.dtype not in COMPUTE_DTYPES:
        raise ValueError(f"models compute in float32 or bfloat16, not {matrices.dtype}")
    return MODELS[config.architecture](config, matrices, device)


def load_model(
    path: str | Path, config: ModelConfig, matrices: Matrices, device: torch.device
) -> DeepseekV32:
    """Build a model and fill it from its checkpoint; arguments and errors as the two steps'."""
    model = build_model(config, matrices, device)
    load_weights(model, path)
    return model


def weight_bytes(config: ModelConfig, matrices: Matrices) -> int:
    """Bytes that the weights of a model take on its device."""
    model = build_model(config, matrices, torch.device("meta"))
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
