"""The CUDA kernels on the CPU: g++ compiles their sources against emulate.h, ctypes calls them.

Blocks are small here, so that few elements already cross warps, blocks and clusters. A seed fixes
the order in which threads run.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from echokv.kernels.cuda import (
    append,
    fetch_listed,
    prefill_prefetch,
    recall,
    schedule,
    topk,
    victims,
)
from echokv.kernels.cuda.build import FOLDER
from echokv.kernels.cuda.launch import Arguments, pointer
from echokv.kernels.cuda.layer import (
    append_shared_bytes,
    layer_of,
    moves_16_bytes,
    rows_to_append,
)
from echokv.kernels.fused_layer import MOST_NEW_ROWS, FusedLayer, FusedLayers, NewRows
from echokv.kernels.prefetch_args import CandidateLists, LayerPrefetch
from echokv.kernels.reference.index_scores import index_scores as reference_scores
from echokv.kernels.reference.topk import topk_rows as reference_topk_rows
from echokv.kernels.registry import load_kernels
from echokv.memory.formats import IndexKeyFormat

HERE = Path(__file__).parent
TOPK_THREADS = 256
TOPK_HELD = 1
RECALL_THREADS = 64
VICTIM_THREADS = 64
LIST_ENTRIES = 256
LISTED_THREADS = 64
_UNKNOWN = 0x7FC0DEAD  # as in prefetch.cuh: the bits of a k-th score that isn't there yet
FEW_ENTRIES = 512
"""Of a selection in which a warp has four entries, as in a decode step; in larger ones 32."""

COMPILER = shutil.which("g++")


@functools.cache
def emulator() -> "Emulator":
    """The emulator of this process, compiled on first use."""
    with tempfile.TemporaryDirectory() as folder:
        return Emulator(Path(folder))


def emulated_kernels() -> Any:
    """`Kernels` on the CPU: the emulated fused recall, and the reference for all else."""
    ops = vars(load_kernels("reference", torch.device("cpu")))
    made = emulator()
    ahead = SimpleNamespace(
        candidate_lists=made.candidate_lists,
        fetches=made.fetches,
        index_scores_prefetch=made.index_scores_prefetch,
        prefill_scores_prefetch=made.prefill_scores_prefetch,
        topk_rows=made.topk_rows_known,
    )
    ops |= {"name": "cuda", "fused": made, "fused_prefetch": ahead}
    return SimpleNamespace(**ops)


class PrefetchRun(Arguments):
    """See emulated.cc."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("block_tables", "request_rows", "scores", "shares", "kth", "lists")
        ),
        *((name, ctypes.c_uint32) for name in ("blocks", "scoring", "known", "pad")),
        ("listed", fetch_listed.ListedArguments),
    )


class TilingRun(Arguments):
    """See emulated.cc."""

    _fields_ = (
        ("rows", schedule.Rows),
        *((name, ctypes.c_void_p) for name in ("works", "covered")),
        ("most", ctypes.c_uint32),
    )


class InterRun(Arguments):
    """See emulated.cc."""

    _fields_ = (
        ("prefetch", prefill_prefetch.InterArguments),
        *((name, ctypes.c_void_p) for name in ("given", "scores")),
        *((name, ctypes.c_uint32) for name in ("scoring", "fetching")),
    )


class Emulator:
    """The shared library, with the same arguments as the wrappers of `kernels/cuda`."""

    def __init__(self, folder: Path) -> None:
        library = folder / "emulated.so"
        subprocess.run(
            [str(COMPILER), "-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas",
             "-DECHOKV_EMULATE", f"-DTOPK_THREADS={TOPK_THREADS}",
             f"-DTOPK_HELD={TOPK_HELD}", f"-DLIST_ENTRIES={LIST_ENTRIES}",
             f"-DLISTED_THREADS={LISTED_THREADS}", f"-DRECALL_THREADS={RECALL_THREADS}",
             f"-DVICTIM_THREADS={VICTIM_THREADS}",
             f"-I{FOLDER}", f"-I{HERE}", "-shared", "-fPIC",
             str(HERE / "emulated.cc"), "-o", str(library)],
            check=True,
        )  # fmt: skip
        self._library = ctypes.CDLL(str(library))
        self.seed = 1
        self.append_each = RECALL_THREADS
        """Rows that a block of `append_rows` has."""

    def topk_rows(
        self,
        scores: Tensor,
        context_lens: Tensor,
        k: int,
        request_rows: Tensor,
        block_tables: Tensor,
        *,
        cluster: int,
        cached: int,
        listed: int = 0,
        named: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`topk_rows` by clusters of so many blocks, which keep and list so many scores each.

        Args:
            named: False: `topk`; host slots and scores are what they were, -77 and NaN.
        """
        rows, width = scores.shape
        positions = torch.full((rows, k), -77, dtype=torch.int32)
        kth = torch.full((rows,), torch.nan)
        slots, chosen = torch.full_like(positions, -77), torch.full((rows, k), torch.nan)
        names = topk.Names(request_rows, block_tables, slots, chosen)
        chunk, _, _ = topk.part_of_row(width, cluster)
        cached = min(cached, chunk)
        arguments = topk.TopkArguments(
            pointer(scores), pointer(context_lens), pointer(positions), pointer(kth),
            topk.name_arguments(names if named else None), width, k, chunk, cached, listed,
            topk.quads_a_score(k, TOPK_THREADS),
        )  # fmt: skip
        shared = max(
            topk.FIXED_SHARED_BYTES + 4 * cached,
            topk.list_bytes(listed, chunk),
        )
        self._library.run_topk(
            rows * cluster, cluster, shared, self._next(), ctypes.byref(arguments)
        )
        return positions, kth, slots, chosen

    def tiling(
        self, context_lens: Tensor, request_rows: Tensor, width: int, blocks: int
    ) -> tuple[Tensor, Tensor]:
        """What each block of `prefill_scores` scores, and how far units cover each row.

        Returns:
            [blocks, works, 5] int32: row, rows, tokens, first unit and units, of 0 past the end;
            [T] int32.
        """
        rows = context_lens.shape[0]
        most = rows + 1
        works = torch.zeros((blocks, most, 5), dtype=torch.int32)
        covered = torch.full((rows,), -1, dtype=torch.int32)
        contexts = schedule.Contexts(pointer(context_lens), rows, width)
        arguments = TilingRun(
            schedule.Rows(contexts, pointer(request_rows)),
            pointer(works), pointer(covered), most,
        )  # fmt: skip
        self._library.run_tiling(blocks, self._next(), ctypes.byref(arguments))
        return works, covered

    def choose_victims(
        self, layers: FusedLayers, most_rows: int, most_free: int, *, partly: bool
    ) -> None:
        """`choose_victims`."""
        layers.check()
        arguments = victims.victim_arguments(layers, most_rows, most_free, partly)
        shared = 4 * (VICTIM_THREADS // 32 + victims.AGES)
        self._library.run_choose_victims(
            layers.priority.shape[0] * 2, 2, shared, self._next(), ctypes.byref(arguments)
        )

    def make_resident(
        self,
        host_slots: Tensor,
        scores: Tensor,
        layer: FusedLayer,
        device_slots: Tensor,
        *,
        new_rows: NewRows | None = None,
        beside: bool = False,
        lanes: int | None = None,
        most_blocks: int = 4,
    ) -> None:
        """`make_resident` by at most so many blocks, and one that appends."""
        layer.check()
        rows, k = host_slots.shape
        threads = RECALL_THREADS * (2 if beside else 1)
        plan, arguments = self._resident_run(
            host_slots, scores, layer, device_slots, new_rows, threads=threads,
            lanes=lanes or (4 if rows * k <= FEW_ENTRIES else 32), most_blocks=most_blocks,
        )  # fmt: skip
        count, row_bytes = arguments.new_rows.count, arguments.layer.row_bytes
        assert count <= min(MOST_NEW_ROWS, threads)
        shared = max(
            recall.resident_shared_bytes(threads), append_shared_bytes(threads, count, row_bytes)
        )
        self._library.run_make_resident(
            plan.blocks + (count > 0), threads, shared, self._next(),
            int(plan.tiles == plan.blocks), ctypes.byref(arguments),
        )  # fmt: skip

    def _resident_run(
        self,
        host_slots: Tensor,
        scores: Tensor,
        layer: FusedLayer,
        device_slots: Tensor,
        new_rows: NewRows | None,
        *,
        threads: int,
        lanes: int,
        most_blocks: int,
    ) -> tuple[recall.ResidentPlan, recall.ResidentArguments]:
        """How blocks of so many threads share a selection, and the argument of the run."""
        rows, k = host_slots.shape
        wide = threads > RECALL_THREADS
        plan = recall.ResidentPlan.of(rows, k, lanes, most_blocks, threads, wide=wide)
        new = new_rows or NewRows.none(layer)
        count = new.host_slots.shape[0]
        arguments = recall.ResidentArguments(
            layer_of(layer), rows_to_append(new, layer, each=max(1, count), staged=count % 2 == 1),
            pointer(host_slots), pointer(scores), pointer(device_slots), k,
            plan.tiles, plan.tiles_per_row, plan.lanes, plan.movers,
            moves_16_bytes(layer.host_rows, layer.device_rows), recall.stretch_of(layer),
        )  # fmt: skip
        return plan, arguments

    def append_rows(self, host_slots: Tensor, rows: Tensor, layer: FusedLayer) -> None:
        """`append_rows`."""
        layer.check()
        count, row_bytes = rows.shape
        each = self.append_each
        new = rows_to_append(NewRows(host_slots, rows), layer, each=each, staged=True)
        arguments = append.AppendArguments(layer_of(layer), new)
        shared = append_shared_bytes(RECALL_THREADS, each, row_bytes)
        self._library.run_append_rows(
            -(-count // each), shared, self._next(), ctypes.byref(arguments)
        )

    def prefetch(
        self,
        scores: Tensor,
        block_tables: Tensor,
        request_rows: Tensor,
        context_lens: Tensor,
        prefetch: LayerPrefetch,
        *,
        blocks: int = 3,
        scoring: int = 2,
        known: bool = False,
        tick: int = 0,
    ) -> Tensor:
        """What `index_scores_prefetch` does once there are scores; each block's share of the pages.

        Args:
            prefetch: its lists aren't used.
            known: whether k-th scores come to be known while rows are fetched.
            tick: nanoseconds between two looks at the clock.
        """
        shares = torch.zeros((blocks, 3), dtype=torch.int32)
        arguments, _lists = self._prefetch_run(
            (scores, block_tables, request_rows, context_lens), prefetch, shares, scoring, known
        )
        self._library.run_prefetch(blocks, self._next(), tick, ctypes.byref(arguments))
        return shares

    def prefetch_beside_recall(
        self,
        rows: tuple[Tensor, Tensor, Tensor, Tensor],
        prefetch: LayerPrefetch,
        selection: tuple[Tensor, Tensor, FusedLayer, Tensor],
        *,
        blocks: int,
        recalling: int,
        pauses: int,
        known: bool,
    ) -> None:
        """That, and at the same time `make_resident`.

        Args:
            rows: the first arguments of `prefetch`.
            prefetch: likewise.
            selection: what `make_resident` takes.
            blocks: that fetch.
            recalling: that make the selection resident, at most.
            pauses: of their threads, before.
            known: see `prefetch`.
        """
        shares, threads = torch.zeros((blocks, 3), dtype=torch.int32), 2 * RECALL_THREADS
        arguments, _lists = self._prefetch_run(rows, prefetch, shares, LISTED_THREADS // 32, known)
        plan, resident = self._resident_run(
            *selection, None, threads=threads, lanes=4, most_blocks=recalling
        )
        shared = recall.resident_shared_bytes(threads)
        self._library.run_prefetch_beside_recall(
            blocks, plan.blocks, shared, self._next(), pauses, ctypes.byref(arguments),
            ctypes.byref(resident),
        )  # fmt: skip

    def _prefetch_run(
        self,
        rows: tuple[Tensor, Tensor, Tensor, Tensor],
        prefetch: LayerPrefetch,
        shares: Tensor,
        scoring: int,
        known: bool,
    ) -> tuple[PrefetchRun, CandidateLists]:
        """The argument of a run, and what it points to."""
        scores, block_tables, request_rows, context_lens = rows
        prefetch.found.counts.zero_()
        prefetch.found.host_slots.fill_(-1)
        prefetch.found.scores.fill_(-torch.inf)
        prefetch.kth_scores.view(torch.int32).fill_(_UNKNOWN)
        # What another launch left: candidates of any row, of other epochs.
        shape = (shares.shape[0], scoring, LIST_ENTRIES, 4)
        entries = torch.randint(0, 99, shape, dtype=torch.int32)
        lists = CandidateLists(
            entries=entries, epoch=torch.tensor([100 + self._next()], dtype=torch.int32)
        )
        contexts = fetch_listed.Contexts(pointer(context_lens), *scores.shape)
        arguments = PrefetchRun(
            pointer(block_tables), pointer(request_rows), pointer(scores), pointer(shares),
            pointer(prefetch.kth_scores), pointer(entries), block_tables.shape[1], scoring, known,
            0, fetch_listed.listed_arguments(replace(prefetch, lists=lists), contexts),
        )  # fmt: skip
        return arguments, lists

    def inter_prefetch(
        self,
        scores: Tensor,
        context_lens: Tensor,
        request_rows: Tensor,
        block_tables: Tensor,
        shifts: Tensor,
        layer: FusedLayer,
        *,
        k: int,
        most: int,
        blocks: int = 3,
        scoring: int = 2,
        fetching: int = 2,
    ) -> prefill_prefetch.InterPrefetch:
        """What `prefill_scores_prefetch` does with scores."""
        made = torch.full_like(scores, torch.nan)
        found = prefill_prefetch.inter_prefetch(
            made, context_lens, request_rows, block_tables, shifts, layer, k=k, most=most
        )
        arguments = InterRun(found.arguments, pointer(scores), pointer(made), scoring, fetching)
        self._library.run_inter(blocks, self._next(), ctypes.byref(arguments))
        return found

    def inter_fetch_late(self, prefetch: prefill_prefetch.InterPrefetch) -> None:
        """`fetch_late` of `prefill_prefetch`."""
        self._library.run_inter_late(2, self._next(), ctypes.byref(prefetch.arguments))

    def candidate_lists(self, device: torch.device) -> CandidateLists:
        """`candidate_lists`; what is here isn't used."""
        nothing = torch.zeros((0, 0, 0, 4), dtype=torch.int32, device=device)
        return CandidateLists(entries=nothing, epoch=torch.zeros(1, dtype=torch.int32))

    def fetches(self, query: Tensor, pages: Tensor, fmt: IndexKeyFormat, layer: FusedLayer) -> bool:
        """`fetches`, with keys of any kind."""
        return bool(moves_16_bytes(layer.host_rows, layer.device_rows))

    def index_scores_prefetch(
        self,
        query: Tensor,
        weights: Tensor,
        pages: Tensor,
        fmt: IndexKeyFormat,
        block_tables: Tensor,
        request_rows: Tensor,
        context_lens: Tensor,
        max_context_len: int,
        prefetch: LayerPrefetch,
        fork: Callable[[], AbstractContextManager[None]],
    ) -> Tensor:
        """`index_scores_prefetch`: the reference's scores, then what they name."""
        prefetch.check(query.shape[0], query.device)
        keys = (pages, fmt, block_tables, request_rows, context_lens, max_context_len)
        scores = reference_scores(query, weights, *keys)
        with fork():
            self.prefetch(scores, block_tables, request_rows, context_lens, prefetch)
        return scores

    def prefill_scores_prefetch(
        self,
        query: Tensor,
        weights: Tensor,
        pages: Tensor,
        fmt: IndexKeyFormat,
        block_tables: Tensor,
        request_rows: Tensor,
        context_lens: Tensor,
        max_context_len: int,
        shifts: Tensor,
        layer: FusedLayer,
        *,
        k: int,
        most: int,
    ) -> tuple[Tensor, prefill_prefetch.InterPrefetch]:
        """`prefill_scores_prefetch`: the reference's scores, then what they name.

        The reference's passes have few rows, whose one wave would come too late: so all comes.
        """
        keys = (pages, fmt, block_tables, request_rows, context_lens, max_context_len)
        scores = reference_scores(query, weights, *keys)
        found = self.inter_prefetch(
            scores, context_lens, request_rows, block_tables, shifts, layer, k=k, most=most
        )
        self.inter_fetch_late(found)
        return scores, found

    def topk_rows_known(
        self,
        scores: Tensor,
        context_lens: Tensor,
        k: int,
        request_rows: Tensor,
        block_tables: Tensor,
        kth_scores: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`topk_rows`, by the reference."""
        positions, found, slots, chosen = reference_topk_rows(
            scores, context_lens, k, request_rows, block_tables
        )
        return positions, kth_scores.copy_(found), slots, chosen

    def recall(
        self,
        host_slots: Tensor,
        count: Tensor,
        slot_buffer: Tensor,
        host_rows: Tensor,
        device_rows: Tensor,
    ) -> None:
        """`recall`."""
        whole_words = moves_16_bytes(host_rows, device_rows)
        arguments = recall.GatherArguments(
            pointer(host_slots), pointer(count), pointer(slot_buffer), pointer(host_rows),
            pointer(device_rows), host_rows.shape[1], whole_words,
        )  # fmt: skip
        self._library.run_gather_rows(3, self._next(), ctypes.byref(arguments))

    def _next(self) -> int:
        self.seed += 1
        return self.seed
