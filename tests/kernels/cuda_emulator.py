"""The CUDA kernels on the CPU: g++ compiles their sources against emulate.h, ctypes calls them.

Blocks are small here, so that few elements already cross warps, blocks and clusters. A seed fixes
the order in which threads run.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from echokv.kernels.cuda import index_scores, recall, topk
from echokv.kernels.cuda.build import FOLDER
from echokv.kernels.cuda.launch import Arguments, pointer
from echokv.kernels.fused_layer import FusedLayer

HERE = Path(__file__).parent
TOPK_THREADS = 128
RECALL_THREADS = 64
RING_ENTRIES = index_scores.RING_ENTRIES
COMPILER = shutil.which("g++")


class PrefetchRun(Arguments):
    """See emulated.cc."""

    _fields_ = (
        ("contexts", index_scores.Contexts),
        *((name, ctypes.c_void_p) for name in ("block_tables", "request_rows", "scores", "shares")),
        *((name, ctypes.c_uint32) for name in ("blocks", "scoring", "fetching")),
        ("prefetch", index_scores.PrefetchArguments),
    )


class Emulator:
    """The shared library, with the same arguments as the wrappers of `kernels/cuda`."""

    def __init__(self, folder: Path) -> None:
        library = folder / "emulated.so"
        subprocess.run(
            [str(COMPILER), "-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas",
             "-DECHOKV_EMULATE", f"-DTOPK_THREADS={TOPK_THREADS}",
             f"-DRECALL_THREADS={RECALL_THREADS}", f"-DRING_ENTRIES={RING_ENTRIES}",
             f"-I{FOLDER}", f"-I{HERE}", "-shared", "-fPIC",
             str(HERE / "emulated.cc"), "-o", str(library)],
            check=True,
        )  # fmt: skip
        self._library = ctypes.CDLL(str(library))
        self.seed = 1

    def topk(
        self, scores: Tensor, context_lens: Tensor, k: int, *, cluster: int, cached: int
    ) -> tuple[Tensor, Tensor]:
        """`topk` by clusters of so many blocks, which keep so many scores each."""
        rows, width = scores.shape
        positions = torch.full((rows, k), -77, dtype=torch.int32)
        kth = torch.full((rows,), torch.nan)
        chunk, _, _ = topk.part_of_row(width, cluster)
        cached = min(cached, chunk)
        arguments = topk.TopkArguments(
            pointer(scores), pointer(context_lens), pointer(positions), pointer(kth),
            width, k, chunk, cached,
        )  # fmt: skip
        shared = topk.FIXED_SHARED_BYTES + 4 * cached
        self._library.run_topk(
            rows * cluster, cluster, shared, self._next(), ctypes.byref(arguments)
        )
        return positions, kth

    def choose_victims(
        self, floor: Tensor, priority: Tensor, ready: Tensor, cursors: Tensor, ages: Tensor, n: int
    ) -> None:
        """`choose_victims`."""
        layers, slots = priority.shape
        arguments = recall.VictimArguments(
            pointer(floor), pointer(priority), pointer(ready), pointer(cursors), pointer(ages),
            slots, n,
        )  # fmt: skip
        blocks = -(-slots // (RECALL_THREADS * 16))
        for which, wide in ((0, blocks), (1, 1), (2, blocks)):
            self._library.run_victims(
                which, wide, layers, 4 * recall.AGES, self._next(), ctypes.byref(arguments)
            )

    def make_resident(
        self,
        host_slots: Tensor,
        scores: Tensor,
        floor: Tensor,
        device_free: Tensor,
        priority: Tensor,
        device_to_host: Tensor,
        host_to_device: Tensor,
        ready: Tensor,
        cursor: Tensor,
        barrier: Tensor,
        totals: Tensor,
        host_rows: Tensor,
        device_rows: Tensor,
        device_slots: Tensor,
        *,
        num_ready: int,
        lanes: int | None = None,
        most_blocks: int = 4,
    ) -> None:
        """`make_resident` by at most so many blocks."""
        rows, k = host_slots.shape
        plan = recall.ResidentPlan(rows, k, lanes or 4, most_blocks, RECALL_THREADS // 32)
        layer = recall.layer_of(
            floor, device_free, priority, device_to_host, host_to_device, ready, cursor, barrier,
            totals, host_rows, device_rows, num_ready,
        )  # fmt: skip
        arguments = recall.ResidentArguments(
            layer, pointer(host_slots), pointer(scores), pointer(device_slots), k, plan.tiles,
            plan.tiles_per_row, plan.lanes, recall.moves_16_bytes(host_rows, device_rows), 0,
        )  # fmt: skip
        self._library.run_make_resident(plan.blocks, 512, self._next(), ctypes.byref(arguments))

    def append_rows(
        self, host_slots: Tensor, rows: Tensor, *layer_tensors: Tensor, num_ready: int
    ) -> None:
        """`append_rows`."""
        layer = recall.layer_of(*layer_tensors, num_ready)
        whole_words = recall.moves_16_bytes(rows, *layer_tensors[-2:])
        arguments = recall.AppendArguments(
            layer, pointer(host_slots), pointer(rows), host_slots.shape[0], whole_words
        )
        blocks = -(-host_slots.shape[0] // (RECALL_THREADS // 32))
        self._library.run_append_rows(blocks, 512, self._next(), ctypes.byref(arguments))

    def prefetch(
        self,
        scores: Tensor,
        block_tables: Tensor,
        request_rows: Tensor,
        context_lens: Tensor,
        request_slots: Tensor,
        thresholds: Tensor,
        enabled: Tensor,
        layer: FusedLayer,
        *,
        most: int,
        rows_per_unit: int,
        least: int,
        blocks: int = 3,
        scoring: int = 2,
        fetching: int = 2,
    ) -> tuple[index_scores.Prefetch, Tensor]:
        """What `index_scores_prefetch` does with scores; and each block's share of the pages."""
        rows, width = scores.shape
        counts = torch.zeros(rows, dtype=torch.int32)
        host_slots = torch.full((rows, most), -1, dtype=torch.int32)
        found = torch.full((rows, most), -torch.inf)
        shares = torch.zeros((blocks, 3), dtype=torch.int32)
        prefetch = index_scores.PrefetchArguments(
            index_scores.layer_argument(layer), pointer(request_slots), pointer(thresholds),
            pointer(enabled), pointer(counts), pointer(host_slots), pointer(found), most,
            rows_per_unit, least, rows,
        )  # fmt: skip
        arguments = PrefetchRun(
            index_scores.Contexts(pointer(context_lens), rows, width), pointer(block_tables),
            pointer(request_rows), pointer(scores), pointer(shares), block_tables.shape[1],
            scoring, fetching, prefetch,
        )  # fmt: skip
        self._library.run_prefetch(blocks, self._next(), ctypes.byref(arguments))
        found_here = index_scores.Prefetch(
            host_slots=host_slots, scores=found, counts=counts, layer=layer, arguments=prefetch
        )
        return found_here, shares

    def fetch_late(self, prefetch: index_scores.Prefetch) -> None:
        """`fetch_late`."""
        self._library.run_fetch_late(2, 3, self._next(), ctypes.byref(prefetch.arguments))

    def recall(
        self,
        host_slots: Tensor,
        count: Tensor,
        slot_buffer: Tensor,
        host_rows: Tensor,
        device_rows: Tensor,
    ) -> None:
        """`recall`."""
        whole_words = recall.moves_16_bytes(host_rows, device_rows)
        arguments = recall.GatherArguments(
            pointer(host_slots), pointer(count), pointer(slot_buffer), pointer(host_rows),
            pointer(device_rows), host_rows.shape[1], whole_words,
        )  # fmt: skip
        self._library.run_gather_rows(3, self._next(), ctypes.byref(arguments))

    def _next(self) -> int:
        self.seed += 1
        return self.seed
