"""Which implementation of each op runs: chosen once, at start-up, and never changed silently.

`Kernels` is what the rest of echokv sees: every op as an attribute, the same signature whichever
backend stands behind it. What each op does is said once, in `kernels/reference`.
"""

import importlib
import os
from types import SimpleNamespace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from echokv.errors import KernelUnavailable
from echokv.log import get_logger
from echokv.memory.formats import IndexKeyFormat, RowFormat

logger = get_logger(__name__)

BACKENDS = ("reference", "triton")

OPS = {
    "encode_rows": "rows",
    "decode_rows": "rows",
    "write_index_keys": "index_keys",
    "index_scores": "index_scores",
    "topk": "topk",
    "sparse_mla": "sparse_mla",
    "lookup": "lookup",
    "free": "free",
    "allocate": "allocate",
    "recall": "recall",
    "write_rows": "write_rows",
    "translate": "translate",
    "release": "release",
    "tick": "tick",
    "score_priorities": "priorities",
}
"""Op -> the module that holds it, under the same name in every backend's folder."""

REFERENCE_TOKEN_TILE = 32
"""Rows of a pass on the reference backend: always these many, so that shapes never change."""


class Kernels(Protocol):
    """Every op of one backend. Contracts are the docstrings in `kernels/reference`."""

    @property
    def name(self) -> str:
        """The backend's name."""
        ...

    @property
    def token_tile(self) -> int | None:
        """Rows that every pass must have (padded), or None when any number does."""
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


def load_kernels(backend: str, device: torch.device) -> Kernels:
    """Load every op of one backend for one device.

    Args:
        backend: "reference", "triton", or "auto" (CUDA: triton, CPU: reference).
        device: where the tensors will live.

    Raises:
        KernelUnavailable: an unknown backend, or one that can't run on this device, and why.
    """
    chosen = backend
    if backend == "auto":
        chosen = "triton" if device.type == "cuda" else "reference"
    if chosen not in BACKENDS:
        raise KernelUnavailable(f"--backend {backend!r} is not one of auto, {', '.join(BACKENDS)}")
    if chosen == "triton":
        _require_triton(device)
    functions = {
        op: getattr(importlib.import_module(f"echokv.kernels.{chosen}.{module}"), op)
        for op, module in OPS.items()
    }
    tile = REFERENCE_TOKEN_TILE if chosen == "reference" else None
    logger.info("kernels: %s on %s (asked for: %s)", chosen, device, backend)
    return cast(Kernels, SimpleNamespace(name=chosen, token_tile=tile, **functions))


def _require_triton(device: torch.device) -> None:
    try:
        import triton
    except ImportError as error:
        raise KernelUnavailable(f"--backend triton: triton can't be imported: {error}") from error
    if device.type == "cpu" and not _interpreting(triton):
        raise KernelUnavailable(
            "--backend triton on the CPU needs Triton's interpreter: set TRITON_INTERPRET=1"
            f" before Python starts (it is {os.environ.get('TRITON_INTERPRET', 'unset')})"
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise KernelUnavailable(
            f"--backend triton on {device}: torch {torch.__version__} sees no CUDA device"
        )
    if device.type not in ("cpu", "cuda"):
        raise KernelUnavailable(f"--backend triton runs on cuda, not on {device.type}")


def _interpreting(triton: Any) -> bool:
    return bool(triton.knobs.runtime.interpret)
