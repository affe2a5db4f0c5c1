"""FlashMLA's sparse decode over fp8_ds_mla rows; contract of `kernels/reference/sparse_mla.py`.

Faster than our portable kernel, with one promise less: how a token's sum is split over the GPU
depends on the number of tokens of a call and the token's place among them, so its bits do too.
Decode steps have the same tokens whatever the device pool. Pieces of a prefill don't, so there
every call has the same number of tokens, and a token the place that its row of the pass gives it.
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
PREFILL_TOKENS = 64
"""Of every call of a prefill. At 128 heads each keeps two of an H200's 132 SMs busy."""


class FlashMla:
    """Sparse attention, and the schedules it makes at the first call of each shape.

    A schedule follows from the shapes alone, so all layers and all graphs share it. It must exist
    before a graph is captured: run the step once before.
    """

    def __init__(self) -> None:
        self._library = load_flash_mla()
        self._schedules: dict[tuple[int, int, int], Any] = {}

    def decode(
        self, query: Tensor, rows: Tensor, device_slots: Tensor, fmt: RowFormat, scale: float
    ) -> Tensor:
        """Attend query [T, H, 576] to rows named by device_slots [T, k]: [T, H, 512]."""
        cuts = range(_MOST_TOKENS, query.shape[0], _MOST_TOKENS)
        return self._attend_calls(query, rows, device_slots, fmt, scale, list(cuts))

    def prefill(
        self,
        query: Tensor,
        rows: Tensor,
        device_slots: Tensor,
        fmt: RowFormat,
        scale: float,
        *,
        first_row: int,
    ) -> Tensor:
        """The same for some rows of a pass, with bits that don't depend on which.

        Args:
            query: [T, H, 576] bf16.
            rows: [N, 656] uint8.
            device_slots: [T, k] int32, -1 where a token selects fewer.
            fmt: fp8_ds_mla.
            scale: softmax scale.
            first_row: row of the pass that query[0] is.

        Returns:
            [T, H, 512] bf16.
        """
        tokens = query.shape[0]
        before, after = first_row % PREFILL_TOKENS, -(first_row + tokens) % PREFILL_TOKENS
        if before or after:
            query = functional.pad(query, (0, 0, 0, 0, before, after))
            device_slots = functional.pad(device_slots, (0, 0, before, after), value=-1)
        cuts = range(PREFILL_TOKENS, query.shape[0], PREFILL_TOKENS)
        out = self._attend_calls(query, rows, device_slots, fmt, scale, list(cuts))
        return out[before : before + tokens]

    def _attend_calls(
        self,
        query: Tensor,
        rows: Tensor,
        device_slots: Tensor,
        fmt: RowFormat,
        scale: float,
        cuts: list[int],
    ) -> Tensor:
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
        calls = [
            self._attend(part, rows, slots, fmt, scale)
            for part, slots in zip(
                query.tensor_split(cuts), device_slots.tensor_split(cuts), strict=True
            )
        ]
        out = calls[0] if len(calls) == 1 else torch.cat(calls)
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
