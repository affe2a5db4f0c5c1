"""Runs real engines on a small random checkpoint and writes down every selection they make."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echokv.cache.batch import ForwardBatch
from echokv.config import EngineConfig, ModelConfig
from echokv.engine.build import NO_HOOKS, EngineHooks
from echokv.engine.engine import Engine
from echokv.indexer.indexer import Selection
from echokv.memory.formats import RowFormat
from echokv.memory.slots import BLOCK_TOKENS

Selections = dict[tuple[str, int, int], bytes]
"""(request id, layer, position of the query) -> the selected positions."""


class SelectionLog:
    """An observer that keys selections by request, so that different runs can be compared.

    A token that is computed again (after a preemption) must select the same set again.
    """

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.selections: Selections = {}
        self.inputs: dict[tuple[str, int], int] = {}  # (request id, position) -> token id
        self.repeats = 0

    def __call__(self, layer: int, batch: ForwardBatch, selection: Selection) -> None:
        assert self.engine is not None
        owners = {
            block: request.request_id
            for request in self.engine.scheduler.running
            for block in request.block_ids[request.num_computed_tokens // BLOCK_TOKENS :]
        }
        real = batch.num_real_tokens
        rows = selection.positions[:real].cpu().numpy()
        slots, positions = batch.host_slots[:real].tolist(), batch.positions[:real].tolist()
        tokens = batch.token_ids[:real].tolist()
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            key = (owners[slot // BLOCK_TOKENS], layer, position)
            self.inputs[key[0], position] = tokens[row]
            chosen = rows[row].tobytes()
            if key in self.selections:
                self.repeats += 1
                assert self.selections[key] == chosen, f"{key} selected another set the second time"
            self.selections[key] = chosen

    def of(self, request_id: str) -> dict[tuple[int, int], bytes]:
        """One request's selections by layer and position."""
        return {
            (layer, position): chosen
            for (name, layer, position), chosen in self.selections.items()
            if name == request_id
        }


def host_pool_gib(model: Path, num_blocks: int, dtype: str = "float32") -> float:
    """--host-pool-gib for exactly so many host blocks."""
    config = ModelConfig.from_dir(model)
    fmt = RowFormat(name=dtype, latent_dim=config.kv_lora_rank, rope_dim=config.qk_rope_head_dim)
    nbytes = num_blocks * BLOCK_TOKENS * fmt.row_bytes * config.num_hidden_layers
    return (nbytes + 0.5) / 2**30


def make_engine(
    model: Path, *, observe: bool = True, hooks: EngineHooks = NO_HOOKS, **overrides: Any
) -> tuple[Engine, SelectionLog]:
    """An engine with a log of its selections."""
    log = SelectionLog()
    engine = Engine(
        EngineConfig(model=str(model), **overrides),
        hooks=replace(hooks, observer=log if observe else None),
    )
    log.engine = engine
    return engine, log


def poison_released_rows(engine: Engine) -> None:
    """Fill rows and index keys of released host slots with 0xFF, which reads as NaN."""
    parts = engine._parts
    cache, release = engine.cache, engine.cache.release
    pages = parts.runner._context.indexer._pages

    def release_and_poison(host_slots: Tensor) -> None:
        slots = host_slots.long()
        resident = [
            getattr(cache, "state").host_to_device[layer][slots]  # noqa: B009
            for layer in range(parts.model_config.num_hidden_layers)
        ]
        release(host_slots)
        assert parts.host_pool is not None
        for layer, device_slots in enumerate(resident):
            parts.host_pool.rows[layer, slots] = 0xFF
            cache.rows(layer)[device_slots[device_slots >= 0].long()] = 0xFF
        pages[:, torch.unique(slots // BLOCK_TOKENS)] = 0xFF

    cache.release = release_and_poison  # type: ignore[method-assign]


def python_sources(num_bytes: int) -> str:
    """Real text: standard-library modules one after the other."""
    import argparse

    folder = Path(argparse.__file__).parent
    text = ""
    for file in sorted(folder.glob("*.py")):
        text += f"# {file.name}\n" + file.read_text(errors="replace")
        if len(text) >= num_bytes:
            break
    return text.encode()[:num_bytes].decode(errors="ignore")


def tokens_of(outputs: Sequence[Any]) -> list[int]:
    """The token ids of a request's outputs."""
    return [token for output in outputs for token in output.token_ids]
