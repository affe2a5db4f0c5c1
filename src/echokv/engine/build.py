"""Start-up: from an EngineConfig to everything an engine owns, in the order that can fail early.

Decides (resolve, plan), then loads weights, then takes the pools; checks the plan against what was
really allocated.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from echokv.attention.context import ForwardContext, SelectionObserver
from echokv.attention.sparse_mla import SparseAttention
from echokv.cache.manager import CacheManager
from echokv.cache.policy import EvictionPolicy
from echokv.cache.protocol import KVCache
from echokv.cache.resident import ResidentCache
from echokv.config import EngineConfig, ModelConfig
from echokv.engine.graph import DecodeGraphs, GraphShapes
from echokv.engine.resolve import fp8_refusal, resolve
from echokv.engine.runner import ModelRunner
from echokv.engine.sampler import Sampler
from echokv.engine.scheduler import SchedulerLimits
from echokv.engine.tokenizer import Tokenizer
from echokv.indexer.indexer import Indexer, TokenSelector
from echokv.indexer.prefetch import PrefetchBudget, Prefetcher
from echokv.indexer.threshold import Predictions
from echokv.kernels.libraries import LibraryRequest
from echokv.kernels.prefetch_args import BUDGET_UNIT
from echokv.kernels.protocol import Kernels
from echokv.kernels.registry import load_kernels
from echokv.log import get_logger
from echokv.memory.byte_plan import BytePlan
from echokv.memory.formats import IndexKeyFormat, RowFormat
from echokv.memory.host_memory import HostMemory
from echokv.memory.plan import make_plan
from echokv.memory.pools import DevicePool, HostPool, IndexKeyPool
from echokv.models.deepseek_v32 import DeepseekV32
from echokv.models.matrices import Matrices
from echokv.models.registry import load_model, weight_bytes
from echokv.models.weights import fp8_weights

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineHooks:
    """What tests and benchmarks put in the place of a part; the product sets none of them."""

    observer: SelectionObserver | None = None  # sees every selection of every layer
    on_release: Callable[[list[int]], None] | None = None  # host blocks that layers must forget
    selector: Callable[[DeepseekV32, Indexer], TokenSelector] | None = None  # wraps the indexer
    policy: Callable[[Kernels], EvictionPolicy] | None = None  # None: the product's
    on_predictions: Callable[[Predictions], None] | None = None  # before each step; may overwrite
    prefetch_budget: PrefetchBudget | None = None  # None: the product's
    model: DeepseekV32 | None = None  # ready on its device: neither planned nor loaded
    graph_shapes: GraphShapes | None = None  # decode steps to capture; None: the product's


NO_HOOKS = EngineHooks()


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What an engine is made of."""

    config: EngineConfig  # resolved
    model_config: ModelConfig
    model_name: str
    plan: BytePlan
    limits: SchedulerLimits
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    cache: KVCache
    runner: ModelRunner
    host_pool: HostPool | None
    predictions: Predictions | None  # None: no prefetch

    def close(self) -> None:
        """Give the host pool back; nothing that uses it may be in flight."""
        if self.config.device == "cuda":
            torch.cuda.synchronize()
        if self.host_pool is not None:
            self.host_pool.close()


def plan_engine(
    config: EngineConfig, *, weights_loaded: bool = False
) -> tuple[EngineConfig, ModelConfig, BytePlan]:
    """Decide everything without loading anything: the resolved config, the model's, the budget.

    Args:
        config: what the user chose.
        weights_loaded: the weights are on the device already and take no room from now on.

    Raises:
        ConfigError, CheckpointError, CapacityError: it can't be started as asked.
    """
    model_config = ModelConfig.from_dir(config.model)
    config = resolve(config, model_config)
    plan = make_plan(
        model_config,
        config,
        _row_format(config, model_config),
        _index_key_format(config, model_config),
        weight_bytes=0
        if weights_loaded
        else weight_bytes(model_config, _matrices(config, model_config)),
        device_bytes=torch.cuda.mem_get_info()[0] if config.device == "cuda" else None,
        host_bytes=HostMemory.read().usable,
    )
    return config, model_config, plan


def build_engine_parts(
    config: EngineConfig,
    on_phase: Callable[[str], None],
    hooks: EngineHooks,
) -> EngineParts:
    """Load the model and allocate every pool.

    Args:
        config: what the user chose.
        on_phase: called with a few words before each part that takes time.
        hooks: stand-ins of tests and benchmarks.

    Raises:
        ConfigError, CheckpointError, CapacityError, KernelUnavailable: with what to change.
    """
    on_phase("planning memory")
    model_name = config.served_model_name or Path(config.model).resolve().name
    config, model_config, plan = plan_engine(config, weights_loaded=hooks.model is not None)
    device = torch.device(config.device)
    kernels = load_kernels(config.backend, device, library_request(config, model_config))
    tokenizer = Tokenizer.from_dir(config.model)
    model = hooks.model
    if model is None:
        on_phase("loading weights")
        matrices = _matrices(config, model_config, kernels)
        model = load_model(config.model, model_config, matrices, device)
        plan.verify({"weights": sum(weight.nbytes for weight in model.parameters())})
    on_phase("allocating the pools")
    row_format = _row_format(config, model_config)
    host_pool, cache = _cache(config, model_config, plan, row_format, kernels, device, hooks)
    plan.verify({"metadata": cache.metadata_bytes})
    prefetcher = _prefetcher(config, model_config, plan, row_format, kernels, cache, hooks)
    indexer = _indexer(config, model_config, plan, kernels, device, prefetcher)
    context = ForwardContext(
        hooks.selector(model, indexer) if hooks.selector else indexer,
        SparseAttention(
            kernels,
            cache,
            row_format,
            model_config.softmax_scale,
            model_config.index_topk,
            ahead=prefetcher is not None,
        ),
        hooks.observer,
    )
    tokens = torch.zeros(plan.max_running, dtype=torch.int64, device=device)
    graphs = _graphs(config, plan, model, context, kernels, tokens, hooks.graph_shapes, on_phase)
    eos_token_ids = tuple({*model_config.eos_token_ids, *tokenizer.eos_token_ids})
    logger.info(
        "%s on %s: %s, kv cache %s, index keys %s, %s kernels, %s",
        *(model_name, config.device, config.dtype, row_format.name, config.index_key_dtype),
        *(kernels.name, "offloaded" if config.offload else "everything resident"),
    )
    return EngineParts(
        config=config,
        model_config=model_config,
        model_name=model_name,
        plan=plan,
        limits=SchedulerLimits(
            max_running=plan.max_running,
            max_batched_tokens=config.max_num_batched_tokens,
            max_waiting=config.max_waiting_requests,
            max_model_len=plan.max_model_len,
        ),
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        cache=cache,
        runner=ModelRunner(
            model,
            context,
            Sampler(eos_token_ids, kernels),
            token_tile=kernels.token_tile,
            tokens=tokens,
            graphs=graphs,
        ),
        host_pool=host_pool,
        predictions=None if prefetcher is None else prefetcher.predictions,
    )


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
        row_format=_row_format(config, model),
        index_key_format=_index_key_format(config, model),
        num_heads=model.num_attention_heads,
        index_heads=model.index_n_heads,
        dtype=getattr(torch, config.dtype),
        fp8_weights=has_fp8,
    )


def _matrices(config: EngineConfig, model: ModelConfig, kernels: Kernels | None = None) -> Matrices:
    """How the checkpoint's matrices are kept; without kernels for counting only."""
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


def _cache(
    config: EngineConfig,
    model: ModelConfig,
    plan: BytePlan,
    row_format: RowFormat,
    kernels: Kernels,
    device: torch.device,
    hooks: EngineHooks,
) -> tuple[HostPool | None, KVCache]:
    layers, row_bytes = model.num_hidden_layers, row_format.row_bytes
    device_pool = DevicePool(layers, plan.device_slots, row_bytes, device)
    plan.verify({"device pool": device_pool.rows.nbytes})
    if not config.offload:
        return None, ResidentCache(kernels, device_pool)
    host_pool = HostPool(layers, plan.host_slots, row_bytes, device)
    plan.verify({"host pool": host_pool.rows.nbytes})
    policy = hooks.policy(kernels) if hooks.policy else None
    return host_pool, CacheManager(kernels, host_pool, device_pool, policy)


def _indexer(
    config: EngineConfig,
    model: ModelConfig,
    plan: BytePlan,
    kernels: Kernels,
    device: torch.device,
    prefetcher: Prefetcher | None,
) -> Indexer:
    fmt = _index_key_format(config, model)
    layers = len(model.index_layers)
    pool = IndexKeyPool(layers, plan.num_host_blocks, fmt.page_bytes, device)
    plan.verify({"index keys": pool.pages.nbytes})
    return Indexer(kernels, pool.pages, fmt, model.index_topk, prefetcher)


def _prefetcher(
    config: EngineConfig,
    model: ModelConfig,
    plan: BytePlan,
    row_format: RowFormat,
    kernels: Kernels,
    cache: KVCache,
    hooks: EngineHooks,
) -> Prefetcher | None:
    """What fetches rows ahead of decode's selections, where that is on."""
    if config.prefetch == "off" or not isinstance(cache, CacheManager):
        logger.info("no prefetch")
        return None
    budget = hooks.prefetch_budget or PrefetchBudget.of(row_format)
    logger.info(
        "prefetch in decode steps: at most %d rows a request and layer, and %d in 1000 tokens",
        budget.least,
        budget.rows_per_unit * 1000 // BUDGET_UNIT,
    )
    predictions = Predictions.create(
        len(model.index_layers), plan.max_running, torch.device(config.device)
    )
    return Prefetcher(
        kernels, cache, predictions, budget, tuple(model.index_layers), model.index_topk
    )


def _graphs(
    config: EngineConfig,
    plan: BytePlan,
    model: DeepseekV32,
    context: ForwardContext,
    kernels: Kernels,
    tokens: torch.Tensor,
    shapes: GraphShapes | None,
    on_phase: Callable[[str], None],
) -> DecodeGraphs | None:
    """Captured decode steps, or None with the reason in the log."""
    reasons = {
        "no GPU": config.device != "cuda",
        "--enforce-eager": config.enforce_eager,
        "experts in float32 are looped over by the CPU": config.dtype == "float32",
        "selections are being observed": context.observer is not None,
    }
    reason = next((words for words, holds in reasons.items() if holds), None)
    if reason is not None:
        logger.info("decode runs without CUDA graphs: %s", reason)
        return None
    on_phase("capturing graphs")
    return DecodeGraphs(
        model,
        context,
        kernels,
        max_model_len=plan.max_model_len,
        tokens=tokens,
        shapes=shapes,
    )


def _row_format(config: EngineConfig, model: ModelConfig) -> RowFormat:
    return RowFormat(
        name=config.kv_cache_dtype, latent_dim=model.kv_lora_rank, rope_dim=model.qk_rope_head_dim
    )


def _index_key_format(config: EngineConfig, model: ModelConfig) -> IndexKeyFormat:
    return IndexKeyFormat(name=config.index_key_dtype, head_dim=model.index_head_dim)
