"""FlashMLA's sparse decode over fp8_ds_mla rows; contract of `kernels/reference/sparse_mla.py`.

Faster than our portable kernel, with one promise less: how a token's sum is split over the GPU
depends on the number of tokens, so its bits do too. Decode steps have the same tokens whatever the
device pool; pieces of a prefill don't, and keep the kernel that doesn't mind.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from echokv.kernels.libraries import load_flash_mla
from echokv.kernels.reference.sparse_mla import check_mla_args
from echokv.memory.formats import RowFormat

_HEADS = (64, 128)  # what it takes; others are padded
_ROWS = 64  # a selection is padded to a multiple of this
_MOST_TOKENS = 256  # of one call: it keeps 256 KiB of partial results for each


class FlashMla:
    """Sparse decode, and the schedules it makes at the first call of each shape.

    A schedule follows from the shapes alone, so all layers and all graphs share it. It must exist
    before a graph is captured: run the step once before.
    """

    def __init__(self) -> None:
        self._library = load_flash_mla()
        self._schedules: dict[tuple[int, int, int], Any] = {}

    def decode_mla(
        self, query: Tensor, rows: Tensor, device_slots: Tensor, fmt: RowFormat, scale: float
    ) -> Tensor:
        """Attend query [T, H, 576] to rows named by device_slots [T, k]: [T, H, 512]."""
        check_mla_args(query, rows, device_slots, fmt)
        tokens, heads, _ = query.shape
        padded = next(size for size in _HEADS if size >= heads)
        if padded != heads:
            query = functional.pad(query, (0, 0, 0, padded - heads))
        if device_slots.shape[1] % _ROWS:
            device_slots = functional.pad(
                device_slots, (0, -device_slots.shape[1] % _ROWS), value=-1
            )
        if tokens == 0 or device_slots.shape[1] == 0:
            return query.new_zeros(tokens, heads, fmt.latent_dim)
        pieces = [
            self._attend(query[at : at + _MOST_TOKENS], rows, device_slots[at : at + _MOST_TOKENS],
                         fmt, scale)
            for at in range(0, tokens, _MOST_TOKENS)
        ]  # fmt: skip
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return out if padded == heads else out[:, :heads].contiguous()

    def _attend(
        self, query: Tensor, rows: Tensor, device_slots: Tensor, fmt: RowFormat, scale: float
    ) -> Tensor:
        tokens, heads, _ = query.shape
        out, _ = self._library.flash_mla_with_kvcache(
            query[:, None],
            rows.view(-1, 1, 1, fmt.row_bytes),  # pages of one row: an index is a device slot
            None,
            None,
            fmt.latent_dim,
            self._schedule(tokens, heads, device_slots.shape[1]),
            softmax_scale=scale,
            is_fp8_kvcache=True,
            indices=device_slots[:, None],
            use_legacy=True,
        )
        attended: Tensor = out[:, 0]
        return attended

    def _schedule(self, tokens: int, heads: int, rows: int) -> Any:
        shape = (tokens, heads, rows)
        if shape not in self._schedules:
            assert not torch.cuda.is_current_stream_capturing(), (
                f"FlashMLA's schedule for {shape} must be made before a graph is captured"
            )
            self._schedules[shape], _ = self._library.get_mla_metadata()
        return self._schedules[shape]
