"""Start-up: from an EngineConfig to everything an engine owns, in the order that can fail early.

Decides (resolve, plan), then loads weights, then takes the pools; checks the plan against what was
really allocated.
"""

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
from echokv.cache.side_stream import SideStream
from echokv.config import EngineConfig, ModelConfig
from echokv.engine.choices import index_key_format, library_request, matrices_of, row_format
from echokv.engine.graph import DecodeGraphs, GraphShapes
from echokv.engine.resolve import resolve
from echokv.engine.runner import ModelRunner
from echokv.engine.sampler import Sampler
from echokv.engine.scheduler import SchedulerLimits
from echokv.engine.tokenizer import Tokenizer
from echokv.indexer.indexer import Indexer, TokenSelector
from echokv.indexer.prefetch import PrefetchBudget, Prefetcher
from echokv.indexer.threshold import Predictions
from echokv.kernels.prefetch_args import BUDGET_UNIT
from echokv.kernels.protocol import Kernels
from echokv.kernels.registry import load_kernels
from echokv.log import get_logger
from echokv.memory.byte_plan import BytePlan
from echokv.memory.host_memory import HostMemory
from echokv.memory.plan import make_plan
from echokv.memory.pools import DevicePool, HostPool, IndexKeyPool
from echokv.models.deepseek_v32 import DeepseekV32
from echokv.models.registry import load_model, weight_bytes

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
    host_memory: torch.Tensor | None = None  # another pool's, to lie in; None: its own


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
    config: EngineConfig, *, weights_loaded: bool = False, host_held: int = 0
) -> tuple[EngineConfig, ModelConfig, BytePlan]:
    """Decide everything without loading anything: the resolved config, the model's, the budget.

    Args:
        config: what the user chose.
        weights_loaded: the weights are on the device already and take no room from now on.
        host_held: bytes of host memory that the host pool may lie in and that are taken already.

    Raises:
        ConfigError, CheckpointError, CapacityError: it can't be started as asked.
    """
    model_config = ModelConfig.from_dir(config.model)
    config = resolve(config, model_config)
    weights = 0
    if not weights_loaded:
        weights = weight_bytes(model_config, matrices_of(config, model_config))
    plan = make_plan(
        model_config,
        config,
        row_format(config, model_config),
        index_key_format(config, model_config),
        weight_bytes=weights,
        device_bytes=torch.cuda.mem_get_info()[0] if config.device == "cuda" else None,
        host_bytes=HostMemory.read().usable + host_held,
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
    held = 0 if hooks.host_memory is None else hooks.host_memory.numel()
    config, model_config, plan = plan_engine(
        config, weights_loaded=hooks.model is not None, host_held=held
    )
    device = torch.device(config.device)
    kernels = load_kernels(config.backend, device, library_request(config, model_config))
    decided = _Decided(
        config=config, model=model_config, plan=plan, kernels=kernels, device=device, hooks=hooks
    )
    tokenizer = Tokenizer.from_dir(config.model)
    model = _model(decided, on_phase)
    on_phase("allocating the pools")
    host_pool, cache = _cache(decided)
    prefetcher = _prefetcher(decided, cache)
    context = _context(decided, model, cache, prefetcher)
    tokens = torch.zeros(plan.max_running, dtype=torch.int64, device=device)
    graphs = _graphs(decided, model, context, tokens, on_phase)
    eos_token_ids = tuple({*model_config.eos_token_ids, *tokenizer.eos_token_ids})
    logger.info(
        "%s on %s: %s, kv cache %s, index keys %s, %s kernels, %s",
        *(model_name, config.device, config.dtype, config.kv_cache_dtype, config.index_key_dtype),
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


@dataclass(frozen=True, kw_only=True)
class _Decided:
    """What is settled before anything is loaded."""

    config: EngineConfig  # resolved
    model: ModelConfig
    plan: BytePlan
    kernels: Kernels
    device: torch.device
    hooks: EngineHooks


def _model(decided: _Decided, on_phase: Callable[[str], None]) -> DeepseekV32:
    if decided.hooks.model is not None:
        return decided.hooks.model
    on_phase("loading weights")
    config, device = decided.config, decided.device
    matrices = matrices_of(config, decided.model, decided.kernels)
    model = load_model(config.model, decided.model, matrices, device)
    decided.plan.verify({"weights": sum(weight.nbytes for weight in model.parameters())})
    return model


def _cache(decided: _Decided) -> tuple[HostPool | None, KVCache]:
    config, plan, kernels, device = decided.config, decided.plan, decided.kernels, decided.device
    layers = decided.model.num_hidden_layers
    row_bytes = row_format(config, decided.model).row_bytes
    device_pool = DevicePool(layers, plan.device_slots, row_bytes, device)
    plan.verify({"device pool": device_pool.rows.nbytes})
    if not config.offload:
        resident = ResidentCache(kernels, device_pool)
        plan.verify({"metadata": resident.metadata_bytes})
        return None, resident
    host_pool = HostPool(
        layers, plan.host_slots, row_bytes, device, config.host_memory, decided.hooks.host_memory
    )
    plan.verify({"host pool": host_pool.rows.nbytes})
    policy = decided.hooks.policy(kernels) if decided.hooks.policy else None
    manager = CacheManager(kernels, host_pool, device_pool, policy)
    plan.verify({"metadata": manager.metadata_bytes})
    return host_pool, manager


def _prefetcher(decided: _Decided, cache: KVCache) -> Prefetcher | None:
    """What fetches rows ahead of selections, where that is on."""
    config, model = decided.config, decided.model
    if config.prefetch == "off" or not isinstance(cache, CacheManager):
        logger.info("no prefetch")
        return None
    budget = decided.hooks.prefetch_budget or PrefetchBudget.of(row_format(config, model))
    everywhere = config.prefetch == "on"
    logger.info(
        "prefetch in decode steps%s: at most %d rows a request and layer, and %d in 1000 tokens",
        " and prefill passes" if everywhere else "",
        budget.least,
        budget.rows_per_unit * 1000 // BUDGET_UNIT,
    )
    layers = tuple(model.index_layers)
    predictions = Predictions.create(len(layers), decided.plan.max_running, decided.device)
    return Prefetcher(
        decided.kernels, cache, predictions, budget, layers, model.index_topk, prefill=everywhere
    )


def _context(
    decided: _Decided, model: DeepseekV32, cache: KVCache, prefetcher: Prefetcher | None
) -> ForwardContext:
    """The indexer, with the pool of its keys, and the attention."""
    config, sizes, kernels, hooks = decided.config, decided.model, decided.kernels, decided.hooks
    fmt = index_key_format(config, sizes)
    blocks = decided.plan.num_host_blocks
    pool = IndexKeyPool(len(sizes.index_layers), blocks, fmt.page_bytes, decided.device)
    decided.plan.verify({"index keys": pool.pages.nbytes})
    indexer = Indexer(kernels, pool.pages, fmt, sizes.index_topk, prefetcher)
    attention = SparseAttention(
        kernels,
        cache,
        row_format(config, sizes),
        sizes.softmax_scale,
        sizes.index_topk,
        rows_ahead=None if prefetcher is None else prefetcher.rows_ahead,
    )
    selector = hooks.selector(model, indexer) if hooks.selector else indexer
    beside = SideStream(decided.device, urgent=False)
    return ForwardContext(selector, attention, hooks.observer, beside)


def _graphs(
    decided: _Decided,
    model: DeepseekV32,
    context: ForwardContext,
    tokens: torch.Tensor,
    on_phase: Callable[[str], None],
) -> DecodeGraphs | None:
    """Captured decode steps, or None with the reason in the log."""
    config = decided.config
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
        decided.kernels,
        max_model_len=decided.plan.max_model_len,
        tokens=tokens,
        shapes=decided.hooks.graph_shapes,
    )
