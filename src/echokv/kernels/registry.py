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
from echokv.kernels.libraries import OWN, Choice, LibraryRequest, choose
from echokv.log import get_logger
from echokv.memory.formats import IndexKeyFormat, RowFormat

logger = get_logger(__name__)

BACKENDS = ("reference", "triton", "cuda")

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
    "rms_norm": "norms",
    "add_rms_norm": "norms",
    "mla_latents": "latents",
    "index_key_rows": "latents",
    "rotate": "rotary",
    "silu_mul": "gating",
    "add_rounded": "gating",
    "wide_linear": "wide_linear",
    "route": "route",
    "name_rows": "name_rows",
    "fp8_linear": "fp8_linear",
    "fp8_gate_up": "fp8_linear",
    "fp8_experts": "fp8_experts",
}
"""Op -> the module that holds it, under the same name in every backend's folder."""

CUDA_OPS = ("topk", "recall")
"""Ops that have a CUDA C++ kernel; `--backend cuda` takes Triton's for the rest."""

DEEPGEMM_OPS = ("fp8_linear", "fp8_gate_up", "fp8_experts")
"""Ops that DeepGEMM can serve."""

AUTO_ON_HOPPER = "triton"
"""What "auto" takes on Hopper. The CUDA kernels are faster in every case that
benchmarks/results/cuda_cache.json has but top-k of one row of a million, and pass their own tests;
they become the choice when the engine's tests have passed with them on a GPU too."""

REFERENCE_TOKEN_TILE = 32
"""Rows of a pass on the reference backend: always these many, so that shapes never change."""


class FusedRecall(Protocol):
    """A layer's cache management in one launch; contracts are in `kernels/cuda/recall.py`."""

    def victim_workspace(self, layers: int, device: torch.device) -> tuple[Tensor, Tensor]: ...

    def choose_victims(
        self,
        floor: Tensor,
        priority: Tensor,
        ready: Tensor,
        cursors: Tensor,
        ages: Tensor,
        num_ready: int,
    ) -> None: ...

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
    ) -> None: ...

    def append_rows(
        self,
        host_slots: Tensor,
        rows: Tensor,
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
        *,
        num_ready: int,
    ) -> None: ...


class DecodeMla(Protocol):
    """Attention of decode steps, where a library does it; see `kernels/flashmla/decode_mla.py`."""

    def __call__(
        self, query: Tensor, rows: Tensor, device_slots: Tensor, fmt: RowFormat, scale: float
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
    def decode_mla(self) -> DecodeMla | None:
        """`sparse_mla` for decode steps, where a library is faster; None: `sparse_mla` itself."""
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

    def name_rows(
        self, positions: Tensor, scores: Tensor, request_rows: Tensor, block_tables: Tensor
    ) -> tuple[Tensor, Tensor]: ...


def reference_model_kernels() -> ModelKernels:
    """Plain PyTorch, for modules that are built without a backend."""
    names = [name for name in vars(ModelKernels) if name in OPS]
    functions = {
        op: getattr(importlib.import_module(f"echokv.kernels.reference.{OPS[op]}"), op)
        for op in names
    }
    return cast(ModelKernels, SimpleNamespace(**functions))


def load_kernels(
    backend: str, device: torch.device, libraries: LibraryRequest | None = None
) -> Kernels:
    """Load every op of one backend for one device.

    Args:
        backend: "reference", "triton", "cuda", or "auto" (see `auto_backend`).
        device: where the tensors will live.
        libraries: what other projects' kernels may serve; None: nothing.

    Raises:
        KernelUnavailable: an unknown backend, or one that can't run on this device, and why; a
            library that was asked for and can't serve.
    """
    chosen = auto_backend(device) if backend == "auto" else backend
    if chosen not in BACKENDS:
        raise KernelUnavailable(f"--backend {backend!r} is not one of auto, {', '.join(BACKENDS)}")
    if chosen != "reference":
        _require_triton(device, chosen)
    if chosen == "cuda":
        _load_cuda(device)
    functions = {
        op: getattr(importlib.import_module(f"echokv.kernels.{folder_of(chosen, op)}.{module}"), op)
        for op, module in OPS.items()
    }
    fused = importlib.import_module("echokv.kernels.cuda.recall") if chosen == "cuda" else None
    tile = REFERENCE_TOKEN_TILE if chosen == "reference" else None
    logger.info("kernels: %s on %s (asked for: %s)", chosen, device, backend)
    if chosen == "cuda":
        rest = ", ".join(op for op in OPS if op not in CUDA_OPS)
        logger.info("kernels: CUDA C++ for %s, fused recall; Triton for %s",
                    ", ".join(CUDA_OPS), rest)  # fmt: skip
    kernels = SimpleNamespace(
        name=chosen,
        token_tile=tile,
        fused=fused,
        decode_mla=None,
        scheduled_scores=None,
        **functions,
    )
    if libraries is not None:
        for choice in choose(chosen, device, libraries):
            _take(kernels, choice)
    return cast(Kernels, kernels)


def _take(kernels: SimpleNamespace, choice: Choice) -> None:
    """Put a library's kernels in the place of ours, and say who serves what."""
    why = "" if choice.refusal is None else f" ({choice.refusal})"
    server = f"{kernels.name}'s own" if choice.kernel == OWN else choice.kernel
    logger.info("kernels: %s by %s%s", choice.part, server, why)
    if choice.kernel == "flashmla":
        from echokv.kernels.flashmla.decode_mla import FlashMla

        kernels.decode_mla = FlashMla().decode_mla
    elif choice.kernel == "deepgemm" and choice.part == "indexer":
        from echokv.kernels.deepgemm.index_scores import DeepGemmScores

        kernels.scheduled_scores = DeepGemmScores()
    elif choice.kernel == "deepgemm":
        for op in DEEPGEMM_OPS:
            module = importlib.import_module(f"echokv.kernels.deepgemm.{OPS[op]}")
            setattr(kernels, op, getattr(module, op))


def auto_backend(device: torch.device) -> str:
    """What "auto" means on a device: AUTO_ON_HOPPER, triton on other GPUs, reference on the CPU."""
    if device.type != "cuda":
        return "reference"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] != 9:
        return "triton"
    if AUTO_ON_HOPPER != "cuda":
        logger.info(
            "kernels: auto takes %s; --backend cuda has CUDA C++ for %s and fused recall",
            AUTO_ON_HOPPER,
            ", ".join(CUDA_OPS),
        )
    return AUTO_ON_HOPPER


def folder_of(backend: str, op: str) -> str:
    """The folder of `echokv.kernels` that a backend takes an op from."""
    return "triton" if backend == "cuda" and op not in CUDA_OPS else backend


def _load_cuda(device: torch.device) -> None:
    """Compile and load every CUDA kernel, so that nothing is left for the first step."""
    from echokv.kernels.cuda.launch import require_hopper

    require_hopper(device)
    for op in CUDA_OPS:
        module = importlib.import_module(f"echokv.kernels.cuda.{OPS[op]}")
        module.MODULE.load(device, module.KERNELS)


def _require_triton(device: torch.device, backend: str) -> None:
    try:
        import triton
    except ImportError as error:
        raise KernelUnavailable(
            f"--backend {backend}: triton can't be imported: {error}"
        ) from error
    if backend == "cuda" and device.type != "cuda":
        raise KernelUnavailable(f"--backend cuda runs on cuda, not on {device.type}")
    if device.type == "cpu" and not _interpreting(triton):
        raise KernelUnavailable(
            "--backend triton on the CPU needs Triton's interpreter: set TRITON_INTERPRET=1"
            f" before Python starts (it is {os.environ.get('TRITON_INTERPRET', 'unset')})"
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise KernelUnavailable(
            f"--backend {backend} on {device}: torch {torch.__version__} sees no CUDA device"
        )
    if device.type not in ("cpu", "cuda"):
        raise KernelUnavailable(f"--backend triton runs on cuda, not on {device.type}")


def _interpreting(triton: Any) -> bool:
    return bool(triton.knobs.runtime.interpret)
