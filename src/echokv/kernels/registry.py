"""Which implementation of each op runs: chosen once, at start-up, and never changed silently.

The rest of echokv sees `Kernels` (`kernels/protocol.py`): every op as an attribute, the same
signature whichever backend stands behind it.
"""

import importlib
import os
from types import SimpleNamespace
from typing import Any, cast

import torch

from echokv.errors import KernelUnavailable
from echokv.kernels.libraries import OWN, Choice, LibraryRequest, choose
from echokv.kernels.protocol import Kernels, ModelKernels
from echokv.log import get_logger

logger = get_logger(__name__)

BACKENDS = ("reference", "triton", "cuda")

OPS = {
    "encode_rows": "rows",
    "decode_rows": "rows",
    "write_index_keys": "index_keys",
    "index_scores": "index_scores",
    "topk": "topk",
    "topk_rows": "topk",
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
    "token_weights": "token_weights",
    "prefetch_candidates": "candidates",
    "score_bounds": "score_bounds",
    "update_thresholds": "thresholds",
    "count_useful": "useful",
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

CUDA_OPS = ("index_scores", "topk", "topk_rows", "recall")
"""Ops that have a CUDA C++ kernel; `--backend cuda` takes Triton's for the rest, and for index
scores of other than fp8 keys of 128 dimensions under 32 or 64 heads."""

DEEPGEMM_OPS = ("fp8_linear", "fp8_gate_up", "fp8_experts")
"""Ops that DeepGEMM can serve."""

AUTO_ON_HOPPER = "cuda"
"""What "auto" takes on Hopper; the engine's tests have passed with it on an H200."""

REFERENCE_TOKEN_TILE = 32
"""Rows of a pass on the reference backend: always these many, so that shapes never change."""


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
    fused, ahead = (
        importlib.import_module(f"echokv.kernels.cuda.{module}") if chosen == "cuda" else None
        for module in ("fused", "prefetch")
    )
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
        fused_prefetch=ahead,
        library_mla=None,
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
        from echokv.kernels.flashmla.sparse_mla import FlashMla

        kernels.library_mla = FlashMla()
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
    fused = ("append", "victims", "fetch_listed", "prefill_scores")
    for name in (*dict.fromkeys(OPS[op] for op in CUDA_OPS), *fused):
        module = importlib.import_module(f"echokv.kernels.cuda.{name}")
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
