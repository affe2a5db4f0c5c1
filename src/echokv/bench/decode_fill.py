"""Fills the pools as a prefill would have: random rows and index keys of every token.

Every byte is one that the kernels could have written: rows go through `encode_rows`, keys through
`write_index_keys`. What a host slot holds depends on the seed, the layer and the slot, not on the
pool that holds it, so that an offloaded and a resident engine hold the same.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from echokv.kernels.protocol import Kernels
from echokv.memory.formats import IndexKeyFormat, RowFormat
from echokv.memory.pinned import copy_in
from echokv.memory.slots import BLOCK_TOKENS

_CHUNK_ROWS = {"cuda": 2**17, "cpu": 2**10}
"""Rows made at once, by device; on a GPU 86 MB of fp8 rows."""


@torch.inference_mode()
def fill_rows(
    rows: Tensor,
    layer: int,
    fmt: RowFormat,
    kernels: Kernels,
    device: torch.device,
    seed: int,
) -> None:
    """Fill one layer's rows with normed latents and rotated keys of unit variance.

    Args:
        rows: [N, row_bytes] uint8, on the host or on the device; filled when the device is done.
        layer: whose they are.
        fmt: how a row is laid out.
        kernels: the backend, which encodes on `device`.
        device: where values are made.
        seed: of the values.
    """
    for span, generator in _chunks(rows.shape[0], layer, device, seed):
        latent, rope = (
            _normal(dim, generator)[: span.stop - span.start]
            for dim in (fmt.latent_dim, fmt.rope_dim)
        )
        copy_in(rows[span], kernels.encode_rows(latent, rope, fmt))


@torch.inference_mode()
def fill_index_keys(
    pages: Tensor,
    layer: int,
    fmt: IndexKeyFormat,
    kernels: Kernels,
    device: torch.device,
    seed: int,
) -> None:
    """Fill one layer's index keys with values of unit variance, as a LayerNorm leaves them.

    Args:
        pages: [n_pages, page_bytes] uint8 on `device`.
        layer: whose they are.
        fmt: how a page is laid out.
        kernels: the backend.
        device: where values are made.
        seed: of the values.
    """
    for span, generator in _chunks(pages.shape[0] * BLOCK_TOKENS, layer, device, seed + 1):
        places = torch.arange(span.start, span.stop, dtype=torch.int32, device=device)
        keys = _normal(fmt.head_dim, generator)[: places.shape[0]]
        kernels.write_index_keys(keys, places, pages, fmt)


def _normal(dim: int, generator: torch.Generator) -> Tensor:
    """[chunk, dim] bfloat16; a whole chunk, so that values don't depend on how many are wanted."""
    return torch.randn(
        _CHUNK_ROWS[generator.device.type],
        dim,
        generator=generator,
        device=generator.device,
        dtype=torch.bfloat16,
    )


def _chunks(
    slots: int, layer: int, device: torch.device, seed: int
) -> Iterator[tuple[slice, torch.Generator]]:
    """A layer's slots in chunks, each with the generator seeded for it."""
    size = _CHUNK_ROWS[device.type]
    generator = torch.Generator(device)
    for start in range(0, slots, size):
        generator.manual_seed((seed * 1_000_003 + layer) * 1_000_003 + start // size)
        yield slice(start, min(start + size, slots)), generator
