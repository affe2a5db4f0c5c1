"""SGLang 0.5.23's kernels as its coordinator calls them: the HiSparse swap-in and two top-k.

What is compiled, by nvcc and without a GPU, is the package as published on PyPI; none of it is in
this repository. Needs tvm_ffi, but only where kernels are built, loaded or run.
"""

import hashlib
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VERSION = "0.5.23"
K, HOT, ROW = 2048, 4096, 656
"""What is instantiated: picks and rows of a request's hot buffer, and bytes of a row."""

MODULES = {
    "swap": """
#include "kvcacheio/hisparse.cuh"
#include "elementwise/fast_topk.cuh"
#include <tvm/ffi/function.h>
using namespace sglang;
TVM_FFI_DLL_EXPORT_TYPED_FUNC(swap_in, (load_cache_to_device_buffer<
    960, 2048, 4096, true, false, 1, false, false, false>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fast_topk, (FastTopKKernel<2048, true>::run));
""",
    "topk": """
#include "deepseek_v4/topk_v2.cuh"
#include <tvm/ffi/function.h>
using namespace sglang;
TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk_v2, (TopKKernel<true>::transform_paged));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk_plan, (TopKKernel<true>::plan));
""",
}
"""What of SGLang's headers is instantiated, and under which name."""

FLAGS = (
    "-shared -std=c++20 -O3 --expt-relaxed-constexpr -Xcompiler -fPIC -DSGL_CUDA_ARCH=900"
    " -gencode=arch=compute_90a,code=sm_90a"
    # Its loader probes how many clusters of 16 blocks fit; on an H200 some do, few are used here.
    " -DSGL_TOPK_V2_MAX_C16_OCC1=7"
).split()


def build(sources: Path) -> None:
    """Compile what isn't compiled yet, beside the sources, and note which sources they were."""
    from tvm_ffi import libinfo

    library, jit = Path(libinfo.find_libtvm_ffi()), sources / "sglang/kernels/jit"
    includes = (
        jit / "include", jit / "csrc", libinfo.find_include_path(),
        libinfo.find_dlpack_include_path(),
    )  # fmt: skip
    for name, text in MODULES.items():
        if (sources / f"{name}.so").exists():
            continue
        (sources / f"{name}.cu").write_text(text)
        subprocess.run(
            ["nvcc", *FLAGS, *(f"-I{path}" for path in includes), f"-L{library.parent}",
             "-ltvm_ffi", "-o", sources / f"{name}.so", sources / f"{name}.cu"],
            check=True,
        )  # fmt: skip
    if (sources / "sglang").exists():
        (sources / "sha256").write_text(digest(sources))


def digest(sources: Path) -> str:
    """Of all headers that there are to include."""
    files = sorted((sources / "sglang").rglob("*.cuh"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def load(sources: Path) -> dict[str, Any]:
    """The compiled modules."""
    import tvm_ffi

    return {name: tvm_ffi.load_module(str(sources / f"{name}.so")) for name in MODULES}


def on_this_stream() -> AbstractContextManager[object]:
    """Have the modules' functions run on torch's current stream."""
    import tvm_ffi

    stream: AbstractContextManager[object] = tvm_ffi.use_torch_stream()
    return stream


class HiSparse:
    """SGLang's caches of some layers, by its kernel's own tensors.

    The newest token's row has a place of its own, beside the hot buffer, where it is always found.
    Here it comes after the contexts, so that no pick is given to anybody.

    Args:
        swap_in: its kernel.
        host_rows: [L, N_H, row_bytes] uint8.
        host_slots: [T, context] int64, where each request's tokens lie.
        topk: picks of a request.
        hot: rows of a request's hot buffer.
        stream: has what is called in it run on torch's current stream.
    """

    def __init__(
        self,
        swap_in: Callable[..., None],
        host_rows: Tensor,
        host_slots: Tensor,
        *,
        topk: int = K,
        hot: int = HOT,
        stream: Callable[[], AbstractContextManager[object]] = on_this_stream,
    ) -> None:
        device, (layers, _, row_bytes) = host_slots.device, host_rows.shape
        batch, context = host_slots.shape
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        padded = hot + 1
        self._swap_in, self._stream, self._host_rows = swap_in, stream, host_rows
        self._host_slots, self._row_bytes = host_slots, row_bytes
        self.tokens = torch.full((layers, batch, padded), -1, **ints)  # by place; -1: none
        self.tokens[:, :, hot] = context
        self.order = torch.arange(hot, dtype=torch.int16, device=device).repeat(layers, batch, 1)
        """[L, T, hot]: places, who leaves first in front."""
        self._places = torch.arange(batch * padded, **ints).view(batch, padded)
        self._requests = torch.arange(batch, device=device)
        self._lens = torch.full((batch,), context + 1, dtype=torch.int64, device=device)
        self._real = torch.tensor([batch], **ints)
        self._none = torch.empty(0, device=device)
        self.rows = torch.zeros((layers, batch * padded, row_bytes), dtype=torch.uint8,
                                device=device)  # fmt: skip
        self.found = torch.empty((layers, batch, topk), **ints)

    def swap_in(self, layer: int, positions: Tensor) -> Tensor:
        """[T, k] int32 device rows of one layer's picks, in their order."""
        with self._stream():
            self._swap_in(
                positions, self.tokens[layer], self._host_slots, self._places,
                self._host_rows[layer], self._none, self.rows[layer], self._none,
                self.found[layer], self._requests, self._lens, self.order[layer], self._real, 1,
                self._row_bytes, self._none, self._none, self._none,
            )  # fmt: skip
        return self.found[layer]


TopK = Callable[[Tensor, Tensor], None]
"""Writes the positions of scores [T, W] float32 to [T, k] int32, in any order."""


def topk_kernels(modules: dict[str, Any], context_lens: Tensor) -> dict[str, TopK]:
    """Its kernels of exact top-k.

    Args:
        modules: from `load`.
        context_lens: [T] int32, of what they are going to be called for.
    """
    batch, device = context_lens.shape[0], context_lens.device
    starts = torch.zeros(batch, dtype=torch.int32, device=device)
    plan = torch.zeros((batch + 1, 2), dtype=torch.int32, device=device)
    modules["topk"].topk_plan(context_lens, plan, -1)

    def fast_topk(scores: Tensor, out: Tensor) -> None:
        with on_this_stream():
            modules["swap"].fast_topk(scores, starts, out, context_lens)

    def topk_v2(scores: Tensor, out: Tensor) -> None:
        with on_this_stream():
            modules["topk"].topk_v2(scores, context_lens, None, out, 64, plan, None)

    return {"fast_topk": fast_topk, "topk_v2": topk_v2}
