"""What a backend offers: every op and every optional part, with one signature whoever serves it.

What each op does is said once, in `kernels/reference`; who serves it is chosen in
`kernels/registry.py`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from echokv.kernels.fused_layer import FusedLayer, FusedLayers, NewRows
from echokv.kernels.prefetch_args import CandidateLists, LayerPrefetch
from echokv.memory.formats import IndexKeyFormat, RowFormat


class FusedRecall(Protocol):
    """A layer's cache management by few launches.

    Contracts are in `kernels/cuda/{victims,recall,append}.py`.
    """

    def choose_victims(
        self, layers: FusedLayers, most_rows: int, most_free: int, *, partly: bool
    ) -> None: ...

    def make_resident(
        self,
        host_slots: Tensor,
        scores: Tensor,
        layer: FusedLayer,
        device_slots: Tensor,
        *,
        new_rows: NewRows | None = None,
        beside: bool = False,
    ) -> None: ...

    def append_rows(self, host_slots: Tensor, rows: Tensor, layer: FusedLayer) -> None: ...


class LibraryMla(Protocol):
    """Sparse attention by a library; see `kernels/flashmla/sparse_mla.py`."""

    def decode(
        self, query: Tensor, rows: Tensor, device_slots: Tensor, fmt: RowFormat, scale: float
    ) -> Tensor: ...

    def prefill(
        self,
        query: Tensor,
        rows: Tensor,
        device_slots: Tensor,
        fmt: RowFormat,
        scale: float,
        *,
        first_row: int,
    ) -> Tensor: ...


class ScheduledScores(Protocol):
    """Index scores with work cut up once a pass; see `kernels/deepgemm/index_scores.py`."""

    def schedule(
        self,
        block_tables: Tensor,
        request_rows: Tensor,
        context_lens: Tensor,
        max_context_len: int,
    ) -> Any: ...

    def index_scores(
        self, query: Tensor, weights: Tensor, pages: Tensor, fmt: IndexKeyFormat, schedule: Any
    ) -> Tensor: ...


class Fp8Kernels(Protocol):
    """Products with weights in block-scaled fp8."""

    def fp8_linear(self, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor: ...

    def fp8_gate_up(self, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor: ...

    def fp8_experts(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
    ) -> Tensor: ...


class ModelKernels(Protocol):
    """What stands between a model's products."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...

    def mla_latents(
        self,
        q_a: Tensor,
        kv_a: Tensor,
        q_weight: Tensor,
        kv_weight: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def index_key_rows(
        self,
        keys: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        *,
        interleaved: bool,
    ) -> Tensor: ...

    def rotate(
        self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, interleaved: bool
    ) -> None: ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor: ...

    def route(
        self,
        logits: Tensor,
        bias: Tensor,
        *,
        groups: int,
        chosen_groups: int,
        chosen: int,
        normalise: bool,
        factor: float,
    ) -> tuple[Tensor, Tensor]: ...

    def add_rounded(self, total: Tensor, more: Tensor) -> Tensor: ...

    def wide_linear(self, x: Tensor, weight: Tensor, factor: float) -> Tensor: ...


class Fetched(Protocol):
    """What a prefill pass has fetched in a layer."""

    @property
    def host_slots(self) -> Tensor:
        """[most] int32: distinct ones that were fetched; -1 elsewhere."""
        ...


class FusedPrefetch(Protocol):
    """Scores and rows of a layer at the same time.

    See `kernels/cuda/index_scores.py`, and for prefill `kernels/cuda/prefill_prefetch.py`.
    """

    def fetches(
        self, query: Tensor, pages: Tensor, fmt: IndexKeyFormat, layer: FusedLayer
    ) -> bool: ...

    def candidate_lists(self, device: torch.device) -> CandidateLists: ...

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
    ) -> Tensor: ...

    def topk_rows(
        self,
        scores: Tensor,
        context_lens: Tensor,
        k: int,
        request_rows: Tensor,
        block_tables: Tensor,
        kth_scores: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

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
    ) -> tuple[Tensor, Fetched]: ...


class Kernels(Fp8Kernels, ModelKernels, Protocol):
    """Every op of one backend. Contracts are the docstrings in `kernels/reference`."""

    @property
    def name(self) -> str:
        """The backend's name."""
        ...

    @property
    def token_tile(self) -> int | None:
        """Rows that every pass must have (padded), or None when any number does."""
        ...

    @property
    def fused(self) -> FusedRecall | None:
        """Lookup, free, allocate, recall and translate as one op, where the backend has it."""
        ...

    @property
    def fused_prefetch(self) -> FusedPrefetch | None:
        """Candidates, lookup, free, allocate and recall as one op, where the backend has it."""
        ...

    @property
    def library_mla(self) -> LibraryMla | None:
        """`sparse_mla` by a library that is faster; None: `sparse_mla` itself."""
        ...

    @property
    def scheduled_scores(self) -> ScheduledScores | None:
        """What computes index scores in the place of `index_scores`; None: nothing does."""
        ...

    def encode_rows(self, latent: Tensor, rope: Tensor, fmt: RowFormat) -> Tensor: ...

    def decode_rows(self, rows: Tensor, fmt: RowFormat, dtype: torch.dtype) -> Tensor: ...

    def write_index_keys(
        self, keys: Tensor, host_slots: Tensor, pages: Tensor, fmt: IndexKeyFormat
    ) -> None: ...

    def index_scores(
        self,
        query: Tensor,
        weights: Tensor,
        pages: Tensor,
        fmt: IndexKeyFormat,
        block_tables: Tensor,
        request_rows: Tensor,
        context_lens: Tensor,
        max_context_len: int,
    ) -> Tensor: ...

    def topk(self, scores: Tensor, context_lens: Tensor, k: int) -> tuple[Tensor, Tensor]: ...

    def topk_rows(
        self,
        scores: Tensor,
        context_lens: Tensor,
        k: int,
        request_rows: Tensor,
        block_tables: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

    def sparse_mla(
        self, query: Tensor, rows: Tensor, device_slots: Tensor, fmt: RowFormat, scale: float
    ) -> Tensor: ...

    def lookup(
        self,
        host_slots: Tensor,
        priorities: Tensor,
        floor: Tensor,
        host_to_device: Tensor,
        priority: Tensor,
        missing: Tensor,
        num_missing: Tensor,
        num_hits: Tensor,
        workspace: Tensor,
    ) -> None: ...

    def free(
        self,
        num_needed: Tensor,
        floor: Tensor,
        device_free: Tensor,
        priority: Tensor,
        device_to_host: Tensor,
        host_to_device: Tensor,
        slot_buffer: Tensor,
        num_freed: Tensor,
        workspace: Tensor,
    ) -> None: ...

    def allocate(
        self,
        host_slots: Tensor,
        count: Tensor,
        floor: Tensor,
        device_free: Tensor,
        priority: Tensor,
        device_to_host: Tensor,
        host_to_device: Tensor,
        slot_buffer: Tensor,
        num_allocated: Tensor,
        workspace: Tensor,
    ) -> None: ...

    def recall(
        self,
        host_slots: Tensor,
        count: Tensor,
        slot_buffer: Tensor,
        host_rows: Tensor,
        device_rows: Tensor,
    ) -> None: ...

    def write_rows(
        self,
        rows: Tensor,
        host_slots: Tensor,
        host_to_device: Tensor,
        host_rows: Tensor,
        device_rows: Tensor,
    ) -> None: ...

    def translate(
        self,
        host_slots: Tensor,
        priorities: Tensor,
        host_to_device: Tensor,
        priority: Tensor,
        device_slots: Tensor,
    ) -> None: ...

    def release(
        self,
        host_slots: Tensor,
        device_free: Tensor,
        priority: Tensor,
        device_to_host: Tensor,
        host_to_device: Tensor,
    ) -> None: ...

    def tick(self, clock: Tensor, floor: Tensor, priority: Tensor) -> None: ...

    def score_priorities(
        self, clock: Tensor, scores: Tensor, host_slots: Tensor, priorities: Tensor
    ) -> None: ...

    def token_weights(
        self, logits: Tensor, best: Tensor, temperature: Tensor, min_p: Tensor, bits: int
    ) -> tuple[Tensor, Tensor]: ...

    def prefetch_candidates(
        self,
        scores: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        request_rows: Tensor,
        request_slots: Tensor,
        thresholds: Tensor,
        limits: Tensor,
        host_to_device: Tensor,
        *,
        most: int,
        rows_per_unit: int,
        least: int,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def score_bounds(
        self,
        scores: Tensor,
        context_lens: Tensor,
        request_rows: Tensor,
        shifts: Tensor,
        k: int,
    ) -> Tensor: ...

    def update_thresholds(
        self,
        request_slots: Tensor,
        kth_scores: Tensor,
        candidate_scores: Tensor,
        num_candidates: Tensor,
        thresholds: Tensor,
        useful: Tensor,
        vain: Tensor,
        limits: Tensor,
    ) -> None: ...

    def count_useful(
        self,
        host_slots: Tensor,
        layers: Tensor,
        floor: Tensor,
        host_to_device: Tensor,
        priority: Tensor,
        totals: Tensor,
    ) -> None: ...

    def name_rows(
        self, positions: Tensor, scores: Tensor, request_rows: Tensor, block_tables: Tensor
    ) -> tuple[Tensor, Tensor]: ...
