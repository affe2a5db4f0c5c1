"""What a resolved config comes to for one model: formats, matrices, what libraries would serve."""

import dataclasses

import torch

from echokv.config import EngineConfig, ModelConfig
from echokv.engine.resolve import fp8_refusal
from echokv.kernels.libraries import LibraryRequest
from echokv.kernels.protocol import Kernels
from echokv.log import get_logger
from echokv.memory.formats import IndexKeyFormat, RowFormat
from echokv.models.matrices import Matrices
from echokv.models.weights import fp8_weights

logger = get_logger(__name__)


def row_format(config: EngineConfig, model: ModelConfig) -> RowFormat:
    """How rows of both pools are laid out."""
    return RowFormat(
        name=config.kv_cache_dtype, latent_dim=model.kv_lora_rank, rope_dim=model.qk_rope_head_dim
    )


def index_key_format(config: EngineConfig, model: ModelConfig) -> IndexKeyFormat:
    """How the indexer's keys are laid out."""
    return IndexKeyFormat(name=config.index_key_dtype, head_dim=model.index_head_dim)


def library_request(config: EngineConfig, model: ModelConfig) -> LibraryRequest:
    """What the libraries' kernels would have to serve; for `load_kernels`.

    Args:
        config: resolved.
        model: the checkpoint's.
    """
    has_fp8 = model.quant_block_size is not None and fp8_refusal(config, model) is None
    return LibraryRequest(
        attention=config.attention_kernel,
        gemm=config.gemm_kernel,
        indexer=config.indexer_kernel,
        row_format=row_format(config, model),
        index_key_format=index_key_format(config, model),
        num_heads=model.num_attention_heads,
        index_heads=model.index_n_heads,
        dtype=getattr(torch, config.dtype),
        fp8_weights=has_fp8,
    )


def matrices_of(
    config: EngineConfig, model: ModelConfig, kernels: Kernels | None = None
) -> Matrices:
    """How the checkpoint's matrices are kept.

    Args:
        config: resolved.
        model: the checkpoint's.
        kernels: the backend; None: for counting only.
    """
    plain = Matrices(dtype=getattr(torch, config.dtype))
    if kernels is not None:
        plain = dataclasses.replace(plain, token_tile=kernels.token_tile, ops=kernels)
    if model.quant_block_size is None:
        return plain
    refusal = fp8_refusal(config, model)
    if kernels is not None:
        state = "kept as stored" if refusal is None else f"converted to {config.dtype}: {refusal}"
        logger.info("block-fp8 weights: %s", state)
    if refusal is not None:
        return plain
    stored = fp8_weights(config.model)
    return dataclasses.replace(plain, keep_fp8=True, kernels=kernels, is_fp8=stored.__contains__)
