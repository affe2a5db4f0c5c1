"""Records a trace while an engine runs: an observer of selections and a watcher of releases.

Knows the engine's request bookkeeping, to tell whose rows it sees; the arrays are `trace_format`'s.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echokv.bench.around_indexer import AroundIndexer
from echokv.bench.trace_format import Trace, score_codes
from echokv.cache.batch import ForwardBatch
from echokv.config import EngineConfig
from echokv.engine.build import EngineHooks
from echokv.engine.engine import Engine
from echokv.engine.offline import drive
from echokv.engine.request import Request
from echokv.engine.sampling_params import SamplingParams
from echokv.indexer.indexer import Indexer, Selection
from echokv.kernels.cache_args import SCORE_BITS
from echokv.kernels.reference.priorities import score_priorities
from echokv.memory.slots import BLOCK_TOKENS
from echokv.models.deepseek_v32 import DeepseekV32

MOST_RANKS = 4
"""Scores are recorded down to rank 4 k."""


def kth_ranks(topk: int) -> list[int]:
    """The ranks whose scores are recorded: eight an octave from k / 8 to 4 k, k among them."""
    steps = range(-24, 8 * (MOST_RANKS.bit_length() - 1) + 1)
    return sorted({max(1, round(topk * 2 ** (step / 8))) for step in steps})


class RankScores(AroundIndexer):
    """An indexer that notes, beside each selection, the scores at certain ranks.

    Args:
        exact: the product's indexer, whose selections are passed on untouched.
        ranks: 1-based, ascending.
        is_wanted: whether to note them for a pass; else `latest` is None.
    """

    def __init__(
        self, exact: Indexer, ranks: Sequence[int], is_wanted: Callable[[ForwardBatch], bool]
    ) -> None:
        super().__init__(exact)
        self.latest: Tensor | None = None  # [T, G] of the selection made last
        self._is_wanted = is_wanted
        self._wide = exact.with_topk(ranks[-1])
        self._columns = torch.tensor(ranks) - 1

    def begin_pass(self, batch: ForwardBatch) -> None:
        """See `Indexer`."""
        super().begin_pass(batch)
        self._wide.begin_pass(batch)

    def select(
        self, index_layer: int, query: Tensor, weights: Tensor, batch: ForwardBatch
    ) -> Selection:
        """See `Indexer`."""
        self.latest = None
        if self._is_wanted(batch):
            wide = self._wide.select(index_layer, query, weights, batch).scores
            self.latest = wide.sort(dim=1, descending=True).values[:, self._columns.to(wide.device)]
        return self._exact.select(index_layer, query, weights, batch)


@dataclass
class _Sequence:
    """One request from admission to its end or preemption."""

    request: Request
    prompt_len: int
    blocks: list[int] = field(default_factory=list)


class TraceRecorder:
    """Collects a trace; `hooks` go into the engine, which `attach` then makes known.

    Args:
        prompt_rows: record the selections of only so many last tokens of each prompt, and of
            what follows; None records all. Writes are recorded in any case.
    """

    def __init__(self, *, prompt_rows: int | None = None) -> None:
        self.hooks = EngineHooks(
            observer=self._observe, on_release=self._release, selector=self._wrap
        )
        self._prompt_rows = prompt_rows
        self._engine: Engine | None = None
        self._ranks: RankScores | None = None
        self._sequences: list[_Sequence] = []
        self._current: dict[tuple[str, int], int] = {}  # (request, preemptions) -> sequence
        self._batch: ForwardBatch | None = None
        self._pass_sizes: list[int] = []
        self._rows: list[tuple[int, int]] = []  # (sequence, position)
        self._selected: list[bool] = []
        self._releases: list[tuple[int, int]] = []
        self._by_layer: dict[int, list[_LayerRows]] = {}
        self._wanted = np.zeros(0, np.int64)  # rows of the current pass to record
        self._has_decoding = False

    def attach(self, engine: Engine) -> None:
        """Name the engine that the hooks are in."""
        self._engine = engine

    def trace(self, about: dict[str, Any]) -> Trace:
        """What was recorded.

        Args:
            about: what was run, for the file's meta.
        """
        assert self._ranks is not None, "the hooks were in no engine"
        layers = sorted(self._by_layer)
        rows = np.array(self._rows, np.int32).reshape(-1, 2)
        releases = np.array(self._releases, np.int32).reshape(-1, 2)
        topk = self._ranks.topk

        def stacked(name: str) -> Any:
            return np.stack(
                [np.concatenate([getattr(p, name) for p in self._by_layer[la]]) for la in layers]
            )

        lens = [len(sequence.blocks) for sequence in self._sequences]
        return Trace(
            meta={"topk": topk, "layers": layers, "kth_ranks": kth_ranks(topk)} | about,
            sequence_prompt_lens=np.array([s.prompt_len for s in self._sequences], np.int32),
            sequence_offsets=np.cumsum([0, *lens]).astype(np.int32),
            sequence_blocks=np.array([b for s in self._sequences for b in s.blocks], np.int32),
            pass_offsets=np.cumsum([0, *self._pass_sizes]).astype(np.int32),
            row_sequence=rows[:, 0],
            row_position=rows[:, 1],
            row_selected=np.array(self._selected, np.bool_),
            release_pass=releases[:, 0],
            release_block=releases[:, 1],
            positions=stacked("positions"),
            score_codes=stacked("codes"),
            kth_scores=stacked("kth"),
            rank_scores=stacked("ranks"),
        )

    def _wrap(self, _model: DeepseekV32, exact: Indexer) -> RankScores:
        self._ranks = RankScores(exact, kth_ranks(exact.topk), self._decodes)
        return self._ranks

    def _release(self, blocks: list[int]) -> None:
        self._releases += [(len(self._pass_sizes), block) for block in blocks]

    def _observe(self, layer: int, batch: ForwardBatch, selection: Selection) -> None:
        assert self._ranks is not None
        wanted = self._wanted
        scores = selection.scores[wanted].float().cpu()
        slots = selection.host_slots[wanted].cpu()
        positions = selection.positions[wanted].cpu().numpy()
        levels = torch.empty_like(slots)
        score_priorities(torch.zeros(1, dtype=torch.int32), scores, slots, levels)
        levels &= (1 << SCORE_BITS) - 1
        ranks = np.full((wanted.size, len(kth_ranks(self._ranks.topk))), np.nan, np.float32)
        if self._ranks.latest is not None:
            ranks[:] = self._ranks.latest[wanted].cpu().numpy()
        self._by_layer.setdefault(layer, []).append(
            _LayerRows(
                positions=positions,
                codes=score_codes(scores.numpy(), positions >= 0, levels.clamp(min=1).numpy()),
                kth=selection.kth_scores[wanted].float().cpu().numpy(),
                ranks=ranks,
            )
        )

    def _decodes(self, batch: ForwardBatch) -> bool:
        """Whether the pass has a decoding row; the first call of a pass begins it."""
        if batch is not self._batch:
            self._begin_pass(batch)
        return self._has_decoding

    def _begin_pass(self, batch: ForwardBatch) -> None:
        """Note whose rows the pass computes."""
        assert self._engine is not None, "attach an engine first"
        self._batch = batch
        real = batch.num_real_tokens
        owners = self._owners()
        wanted, self._has_decoding = [], False
        for slot, position in zip(
            batch.host_slots[:real].tolist(), batch.positions[:real].tolist(), strict=True
        ):
            number = owners[slot // BLOCK_TOKENS]
            self._rows.append((number, position))
            prompt_len = self._sequences[number].prompt_len
            self._has_decoding |= position >= prompt_len
            first = 0 if self._prompt_rows is None else prompt_len - self._prompt_rows
            wanted.append(position >= first)
        self._selected += wanted
        self._wanted = np.flatnonzero(wanted)
        self._pass_sizes.append(real)

    def _owners(self) -> dict[int, int]:
        """Host block -> sequence that writes into it now; shared blocks are never written."""
        assert self._engine is not None
        owners = {}
        for request in self._engine.scheduler.running:
            key = (request.request_id, request.num_preemptions)
            if key not in self._current:
                self._current[key] = len(self._sequences)
                self._sequences.append(_Sequence(request, request.num_tokens))
            number = self._current[key]
            self._sequences[number].blocks = list(request.block_ids)
            start = request.num_computed_tokens // BLOCK_TOKENS
            owners.update(dict.fromkeys(request.block_ids[start:], number))
        return owners


@dataclass(frozen=True)
class _LayerRows:
    """One pass's recorded rows in one layer."""

    positions: Any  # [n, k] int32
    codes: Any  # [n, k] uint8
    kth: Any  # [n] float32
    ranks: Any  # [n, G] float32


def record_trace(
    config: EngineConfig,
    jobs: Sequence[tuple[Sequence[int], SamplingParams]],
    *,
    prompt_rows: int | None = None,
    about: dict[str, Any],
) -> Trace:
    """Run requests in a fresh engine and record what its cache saw.

    Args:
        config: the engine; its device pool doesn't change what is recorded.
        jobs: prompt token ids and sampling parameters.
        prompt_rows: see `TraceRecorder`.
        about: what is run, for the file's meta.

    Raises:
        RequestError: a request that the engine can't run.
    """
    recorder = TraceRecorder(prompt_rows=prompt_rows)
    config = dataclasses.replace(config, enforce_eager=True)  # a replayed graph calls no observer
    engine = Engine(config, hooks=recorder.hooks)
    try:
        recorder.attach(engine)
        for _ in drive(engine, jobs, name="trace"):
            pass
        return recorder.trace({"model": engine.model_name} | about)
    finally:
        engine.close()
