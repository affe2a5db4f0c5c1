"""An engine whose requests begin in the decode state, over pools filled at random.

The product's own `Engine` but for three things: weights that are on the device already, a
scheduler that takes every prompt as computed, and, where asked for, replayed selections.
"""

import dataclasses
import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from echokv.bench.decode_fill import fill_index_keys, fill_rows
from echokv.bench.decode_preset import random_model, write_preset
from echokv.bench.decode_replay import ReplaySelector, SelectionSource
from echokv.config import EngineConfig, ModelConfig
from echokv.engine.build import EngineHooks
from echokv.engine.choices import index_key_format, library_request, row_format
from echokv.engine.engine import Engine
from echokv.engine.request import Request
from echokv.engine.resolve import resolve
from echokv.engine.sampling_params import SamplingParams
from echokv.engine.scheduler import Scheduler
from echokv.errors import CapacityError
from echokv.indexer.indexer import Indexer, TokenSelector
from echokv.kernels.protocol import Kernels
from echokv.kernels.registry import load_kernels
from echokv.log import get_logger, progress
from echokv.memory.formats import IndexKeyFormat, RowFormat
from echokv.memory.pools import HostPool
from echokv.memory.slots import BLOCK_TOKENS, blocks_for
from echokv.models.deepseek_v32 import DeepseekV32

logger = get_logger(__name__)


class PrecomputedScheduler(Scheduler):
    """Admits requests whose prompts are computed, and only with room for their whole output.

    So that no step prefills and none is preempted: what runs is decoding alone.
    """

    def _can_admit(self, request: Request) -> bool:
        promised = sum(blocks_for(running.max_total_tokens) for running in self.running)
        needed = blocks_for(request.max_total_tokens)
        return (
            len(self.running) < self.limits.max_running
            and promised + needed <= self.blocks.num_blocks
        )

    def _admit(self, request: Request) -> None:
        super()._admit(request)
        request.num_computed_tokens = request.num_tokens - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model on its device, to be shared by the engines of one run."""

    engine_config: EngineConfig  # resolved
    config: ModelConfig
    model: DeepseekV32
    kernels: Kernels
    device: torch.device
    seconds: float  # that making its weights took

    @classmethod
    def make(cls, raw: dict[str, Any], directory: Path, config: EngineConfig) -> "LoadedModel":
        """Write config.json and a tokenizer into a directory and make random weights.

        Args:
            raw: config.json.
            directory: to write into; engines read it later.
            config: what all engines of the run share; its `model` is replaced.
        """
        model_config = ModelConfig.from_dir(write_preset(directory, raw))
        config = resolve(dataclasses.replace(config, model=str(directory)), model_config)
        device = torch.device(config.device)
        kernels = load_kernels(config.backend, device, library_request(config, model_config))
        start = time.perf_counter()
        model = random_model(model_config, config, device, kernels)
        synchronise(device)
        return cls(
            engine_config=config,
            config=model_config,
            model=model,
            kernels=kernels,
            device=device,
            seconds=time.perf_counter() - start,
        )

    @property
    def row_format(self) -> RowFormat:
        """How rows of these engines are laid out."""
        return row_format(self.engine_config, self.config)

    @property
    def index_key_format(self) -> IndexKeyFormat:
        """How index keys of these engines are laid out."""
        return index_key_format(self.engine_config, self.config)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(weight.nbytes for weight in self.model.parameters())


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSizes:
    """What one engine holds: tokens of all requests together."""

    offload: bool
    batch: int  # requests running at once
    max_model_len: int
    host_tokens: int  # host slots; without offload, slots on the device
    device_tokens: int  # device slots a layer; without offload the same number


class SharedRows:
    """Host memory full of random rows, for the host pools of one engine after another.

    A row lies at a multiple of its size whatever the number of slots, so what fills the memory for
    one pool is whole rows to the next.

    Args:
        loaded: the model whose rows they are.
        tokens: host slots of the largest pool.

    Attributes:
        memory: [bytes] uint8.
        seconds: what it took to get that memory.
    """

    def __init__(self, loaded: LoadedModel, tokens: int) -> None:
        row, layers = loaded.row_format, loaded.config.num_hidden_layers
        start = time.perf_counter()
        # A pool of one layer as long as all of them.
        kind = loaded.engine_config.host_memory
        self._pool = HostPool(1, tokens * layers, row.row_bytes, loaded.device, kind)
        self.seconds = time.perf_counter() - start
        self.memory = self._pool.rows.flatten()
        seed = loaded.engine_config.seed
        fill_rows(self._pool.rows[0], 0, row, loaded.kernels, loaded.device, seed)
        synchronise(loaded.device)

    def close(self) -> None:
        """Give the memory back; no engine may use it any more."""
        self.memory = self.memory[:0]
        self._pool.close()


class DecodeEngine:
    """An engine with full pools, and requests put straight into the decode state.

    Args:
        loaded: the model.
        sizes: of the pools.
        source: of replayed selections; None: the real indexer's.
        shared: what the host pool lies in; None: memory of its own.

    Attributes:
        engine: the product's engine.
        selector: what selects; a `ReplaySelector` when there is a source.
        seconds: what each part of start-up took.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        sizes: PoolSizes,
        source: SelectionSource | None,
        shared: SharedRows | None = None,
    ) -> None:
        self.loaded = loaded
        self.sizes = sizes
        self.seconds: dict[str, float] = {}
        self._phase_since = ("", time.perf_counter())
        self._indexer: Indexer | None = None
        self.selector: TokenSelector
        config = engine_config(loaded, sizes)
        if source is not None:  # no score says what will be selected
            config = dataclasses.replace(config, prefetch="off")
        self.engine = Engine(
            config,
            on_phase=self._on_phase,
            hooks=EngineHooks(
                model=loaded.model,
                selector=lambda _, indexer: self._keep_selector(indexer, source),
                graph_shapes=((sizes.batch,), (sizes.max_model_len,)),
                host_memory=shared.memory if shared is not None and sizes.offload else None,
            ),
        )
        self._on_phase("")
        if self.engine.scheduler.limits.max_running < sizes.batch:
            raise CapacityError(
                f"--batch {sizes.batch} needs a device pool of {sizes.batch + 1} x index_topk"
                f" {loaded.config.index_topk} tokens, --device-pool-tokens is"
                f" {sizes.device_tokens}"
            )
        self.engine.scheduler = PrecomputedScheduler(
            self.engine.scheduler.limits, self.engine.blocks
        )
        self._fill(rows=shared is None or not sizes.offload)

    def add_requests(self, context_lens: Sequence[int], output_len: int, name: str) -> None:
        """Queue requests that will decode `output_len` tokens after so many computed ones."""
        vocab = self.loaded.config.vocab_size
        params = SamplingParams(max_tokens=output_len, ignore_eos=True, temperature=0.0)
        for number, length in enumerate(context_lens):
            tokens = torch.randint(
                vocab, (length,), generator=torch.Generator().manual_seed(number)
            ).tolist()
            self.engine.add_request(f"{name}-{number}", tokens, params)

    def close(self) -> None:
        """Free the pools, for another engine to take; the model stays."""
        synchronise(self.loaded.device)
        self.engine.close()
        del self.engine, self.selector, self._indexer
        if self.loaded.device.type == "cuda":
            gc.collect()  # graphs and pools hang on cycles
            torch.cuda.empty_cache()

    def _keep_selector(self, indexer: Indexer, source: SelectionSource | None) -> TokenSelector:
        self._indexer = indexer
        layers = len(self.loaded.config.index_layers)
        self.selector = (
            indexer
            if source is None
            else ReplaySelector(indexer, layers, source, self.loaded.device)
        )
        return self.selector

    def _fill(self, *, rows: bool) -> None:
        assert self._indexer is not None, "building the engine made the selector"
        loaded, seed = self.loaded, self.loaded.engine_config.seed
        host, cache = self.engine.host_pool, self.engine.cache
        layers = range(loaded.config.num_hidden_layers if rows else 0)
        start = time.perf_counter()
        for layer in progress(layers, total=len(layers), what="random rows", unit="layer"):
            layer_rows = cache.rows(layer) if host is None else host.rows[layer]
            fill_rows(layer_rows, layer, loaded.row_format, loaded.kernels, loaded.device, seed)
        synchronise(loaded.device)
        self.seconds["rows"] = time.perf_counter() - start
        start = time.perf_counter()
        for layer, pages in enumerate(self._indexer.pages):
            fill_index_keys(
                pages, layer, loaded.index_key_format, loaded.kernels, loaded.device, seed
            )
        synchronise(loaded.device)
        self.seconds["index keys"] = time.perf_counter() - start
        logger.info("start-up: %s", ", ".join(f"{k} {v:.1f} s" for k, v in self.seconds.items()))

    def _on_phase(self, phase: str) -> None:
        name, since = self._phase_since
        now = time.perf_counter()
        if name:
            self.seconds[name] = now - since
        self._phase_since = (phase, now)


def engine_config(loaded: LoadedModel, sizes: PoolSizes) -> EngineConfig:
    """The run's config with one engine's sizes."""
    row_bytes = loaded.row_format.row_bytes * loaded.config.num_hidden_layers
    host_bytes = sizes.host_tokens * row_bytes
    return dataclasses.replace(
        loaded.engine_config,
        offload=sizes.offload,
        host_pool_gib=(host_bytes + 0.5) / 2**30 if sizes.offload else None,
        host_memory=loaded.engine_config.host_memory if sizes.offload else "auto",
        device_pool_tokens=sizes.device_tokens,
        max_num_seqs=sizes.batch,
        max_num_batched_tokens=max(sizes.batch, BLOCK_TOKENS),
        max_model_len=sizes.max_model_len,
        enable_prefix_caching=False,
    )


def synchronise(device: torch.device) -> None:
    """Wait for a device's work; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
