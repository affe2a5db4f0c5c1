"""Drives a model by hand: block tables, pools and passes as the engine would build them.

Memory that was not written is poisoned (0xFF bytes are NaN in every format), and blocks are
handed out in shuffled order, so that an address mixed up shows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from echokv.attention.context import ForwardContext
from echokv.attention.sparse_mla import SparseAttention
from echokv.cache.batch import ForwardBatch
from echokv.cache.manager import CacheManager
from echokv.cache.protocol import KVCache
from echokv.cache.resident import ResidentCache
from echokv.config import ModelConfig
from echokv.indexer.indexer import Indexer, Selection
from echokv.kernels.protocol import Kernels
from echokv.kernels.registry import load_kernels
from echokv.memory.formats import IndexKeyFormat, RowFormat
from echokv.memory.pools import DevicePool, HostPool, IndexKeyPool
from echokv.memory.slots import BLOCK_TOKENS, HostSlots
from echokv.models.matrices import Matrices
from echokv.models.registry import load_model

CPU = torch.device("cpu")
TILE = 32
POISON = 0xFF

Selected = dict[tuple[str, int, int], tuple[int, ...]]
"""(request, layer, position) -> the positions selected, ascending."""


@dataclass
class Request:
    """What one request has so far."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


class Runner:
    """A model with its memory.

    Args:
        path: checkpoint.
        pool_tokens: device pool of an offloaded cache; None: everything resident.
        dtype: compute dtype.
        rows: name of the row format.
        keys: name of the index-key format.
        tile: rows of every pass, padded; None: as many as there are tokens.
        max_blocks: host blocks.
    """

    def __init__(
        self,
        path: Path,
        *,
        pool_tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
        rows: str = "float32",
        keys: str = "float32",
        tile: int | None = TILE,
        max_blocks: int = 24,
    ) -> None:
        self.config = config = ModelConfig.from_dir(path)
        self.kernels = kernels = load_kernels("reference", CPU)
        self.tile = tile
        self.model = load_model(path, config, Matrices(dtype=dtype, token_tile=tile), CPU)
        fmt = RowFormat(name=rows, latent_dim=config.kv_lora_rank, rope_dim=config.qk_rope_head_dim)
        key_fmt = IndexKeyFormat(name=keys, head_dim=config.index_head_dim)
        self.cache = make_cache(kernels, config, fmt, pool_tokens, max_blocks * BLOCK_TOKENS)
        pages = IndexKeyPool(len(config.index_layers), max_blocks, key_fmt.page_bytes, CPU).pages
        pages.fill_(POISON)
        self.indexer = Indexer(kernels, pages, key_fmt, config.index_topk)
        self.attention = SparseAttention(
            kernels, self.cache, fmt, config.softmax_scale, config.index_topk
        )
        self.context = ForwardContext(self.indexer, self.attention, self._observe)
        order = torch.randperm(max_blocks, generator=torch.Generator().manual_seed(7))
        self._free_blocks = order.tolist()
        self.requests: dict[str, Request] = {}
        self.selected: Selected = {}
        self._rows: list[tuple[str, int]] = []

    def run(self, *segments: tuple[str, list[int]]) -> Tensor:
        """One pass over new tokens of some requests; returns hidden states of the real rows."""
        batch = self.batch(*segments)
        return self.model(batch, self.context)[: batch.num_real_tokens]

    def logits(self, *segments: tuple[str, list[int]]) -> Tensor:
        """One pass; logits of the real rows."""
        hidden = self.run(*segments)
        padded = hidden.new_zeros(self.tile or hidden.shape[0], hidden.shape[1])
        padded[: hidden.shape[0]] = hidden
        return self.model.compute_logits(padded)[: hidden.shape[0]]

    def prefill(self, request: str, ids: list[int], chunk: int | None = TILE) -> Tensor:
        """Logits of all tokens, `chunk` a pass, or all in one."""
        chunk = chunk or len(ids)
        parts = [ids[at : at + chunk] for at in range(0, len(ids), chunk)]
        return torch.cat([self.logits((request, part)) for part in parts])

    def batch(self, *segments: tuple[str, list[int]]) -> ForwardBatch:
        """A padded pass; allocates blocks."""
        ids: list[int] = []
        rows: list[tuple[int, int, int]] = []  # request row, position, host slot
        self._rows = []
        for number, (name, tokens) in enumerate(segments):
            request = self.requests.setdefault(name, Request())
            for token in tokens:
                if request.length % BLOCK_TOKENS == 0:
                    request.blocks.append(self._free_blocks.pop())
                slot = request.blocks[-1] * BLOCK_TOKENS + request.length % BLOCK_TOKENS
                ids.append(token)
                rows.append((number, request.length, slot))
                self._rows.append((name, request.length))
                request.length += 1
        real = len(ids)
        pad = (self.tile or real) - real
        tables = [self.requests[name].blocks for name, _ in segments]
        width = max(map(len, tables)) + 1
        columns = torch.tensor(rows, dtype=torch.int32)

        def padded(values: Tensor, fill: int) -> Tensor:
            return torch.cat([values, values.new_full((pad,), fill)])

        return ForwardBatch(
            token_ids=padded(torch.tensor(ids), 0),
            positions=padded(columns[:, 1], 0),
            context_lens=padded(columns[:, 1] + 1, 0),
            host_slots=HostSlots(padded(columns[:, 2], -1)),
            request_rows=padded(columns[:, 0], 0),
            request_slots=None,
            block_tables=torch.tensor(
                [table + [-1] * (width - len(table)) for table in tables], dtype=torch.int32
            ),
            sampled_rows=torch.arange(real),
            max_context_len=max(position + 1 for _, position, _ in rows),
            num_context_rows=sum(self.requests[name].length for name, _ in segments),
            num_real_tokens=real,
        )

    def _observe(self, layer: int, batch: ForwardBatch, selection: Selection) -> None:
        for (name, position), chosen in zip(self._rows, selection.positions.tolist(), strict=False):
            self.selected[name, layer, position] = tuple(p for p in chosen if p >= 0)


def make_cache(
    kernels: Kernels,
    config: ModelConfig,
    fmt: RowFormat,
    pool_tokens: int | None,
    host_slots: int,
) -> KVCache:
    """An offloaded or a resident cache over poisoned pools."""
    layers = config.num_hidden_layers
    device_pool = DevicePool(layers, pool_tokens or host_slots, fmt.row_bytes, CPU)
    device_pool.rows.fill_(POISON)
    if pool_tokens is None:
        return ResidentCache(kernels, device_pool)
    host_pool = HostPool(layers, host_slots, fmt.row_bytes, CPU)
    host_pool.rows.fill_(POISON)
    return CacheManager(kernels, host_pool, device_pool)


class Oracle:
    """Hugging Face's model on the same checkpoint, with its top-k recorded."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model, loading = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        assert not any(loading.values()), loading
        self.selected: Selected = {}
        self._name, self._start = "", 0
        for layer, block in enumerate(self.model.model.layers):
            if block.self_attn.indexer is not None:
                block.self_attn.indexer.register_forward_hook(self._hook(layer))

    def _hook(self, layer: int) -> Callable[..., None]:
        def record(module: object, args: object, indices: Tensor) -> None:
            for row, chosen in enumerate(indices[0].tolist()):
                position = self._start + row
                causal = tuple(sorted(p for p in chosen if p <= position))
                self.selected[self._name, layer, position] = causal

        return record

    @torch.no_grad()
    def logits(self, name: str, ids: list[int]) -> Tensor:
        """Logits of every token, in one whole prefill."""
        self._name, self._start = name, 0
        return self.model(torch.tensor([ids]), use_cache=False).logits[0].float()
