"""The buffers that captured decode steps read, and the pinned ones that they are filled from.

A step costs one small copy, and one more when a block table changed. Staging is doubled: the CPU
fills one buffer while the copy out of the other may still be waiting for the step before.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from echokv.cache.batch import ForwardBatch
from echokv.engine.draw import COLUMNS, GREEDY, MAX_ENDS, Described, DrawInputs
from echokv.engine.scheduler import ScheduledRequest
from echokv.memory.slots import BLOCK_TOKENS, NO_SLOT, HostSlots, blocks_for

_PADDING = {
    "token_ids": 0,
    "sources": -1,
    "positions": 0,
    "context_lens": 0,
    "host_slots": NO_SLOT,
    "request_slots": NO_SLOT,
}
"""Columns of one token a row, and what a row of padding holds. A source is a row of the step
before, whose sampled token is this row's token; -1: token_ids has it."""


class _Layout:
    """Where everything lies in one buffer of bytes, so that one copy takes it over."""

    def __init__(self, max_requests: int) -> None:
        self.rows = max_requests
        self.numbers = max_requests * len(COLUMNS) * 8
        self.columns = max_requests * len(_PADDING) * 4
        self.num_bytes = self.numbers + self.columns + max_requests * MAX_ENDS * 4

    def views(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[C, R] int32 columns; [5, R] float64 and [R, MAX_ENDS] int32 of `DrawInputs`."""
        numbers, columns, ends = buffer.split(
            (self.numbers, self.columns, self.num_bytes - self.numbers - self.columns)
        )
        return (
            columns.view(torch.int32).view(len(_PADDING), self.rows),
            numbers.view(torch.float64).view(len(COLUMNS), self.rows),
            ends.view(torch.int32).view(self.rows, MAX_ENDS),
        )


class _Staging:
    """One set of pinned buffers. `tables` follows requests row by row, each as far as it grew."""

    def __init__(self, layout: _Layout, blocks: int, pin: bool) -> None:
        self.buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, pin_memory=pin)
        self.tables = torch.full((layout.rows, blocks), NO_SLOT, dtype=torch.int32, pin_memory=pin)
        columns, numbers, ends = layout.views(self.buffer)
        self.columns, self.numbers, self.ends = columns.numpy(), numbers.numpy(), ends.numpy()
        self._table_array = self.tables.numpy()
        self._followed: list[tuple[list[int], int]] = [([], 0)] * layout.rows
        self._copied = torch.cuda.Event() if pin else None

    def wait(self) -> None:
        """Until what was copied from here last has arrived: long ago, two steps later."""
        if self._copied is not None:
            self._copied.synchronize()

    def mark(self) -> None:
        """Note that the copies have been enqueued."""
        if self._copied is not None:
            self._copied.record()

    def follow(self, row: int, table: list[int]) -> None:
        """Bring a row of tables up to date. A list that only grew is the same table."""
        followed, length = self._followed[row]
        if followed is not table:
            length = 0
        if length < len(table):
            self._table_array[row, length : len(table)] = table[length:]
            self._followed[row] = (table, len(table))


class DecodeInputs:
    """Fixed buffers for steps of one token a request.

    Args:
        max_requests: most rows of a graph.
        max_model_len: tokens; bounds the block tables.
        device: where the model runs.
        tokens: [max_requests] int64 on the device: what the step before sampled, row by row.
    """

    def __init__(
        self, max_requests: int, max_model_len: int, device: torch.device, tokens: Tensor
    ) -> None:
        layout, blocks = _Layout(max_requests), blocks_for(max_model_len)
        pin = device.type == "cuda"
        self._stagings = [_Staging(layout, blocks, pin) for _ in range(2)]
        self._sampled = tokens
        self._buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        self._columns, numbers, ends = layout.views(self._buffer)
        self._draw = DrawInputs(numbers, ends)
        self._tables = torch.full((max_requests, blocks), NO_SLOT, dtype=torch.int32, device=device)
        self._on_device: list[tuple[list[int], int]] = [([], 0)] * max_requests
        self._rows = torch.arange(max_requests, dtype=torch.int32, device=device)
        self.fill([], [])

    def fill(self, items: Sequence[ScheduledRequest], described: Sequence[Described]) -> None:
        """Stage one step and enqueue its copies; rows past the batch become padding.

        Args:
            items: one token a request.
            described: how each row is drawn; shorter than items, or empty: the rest is greedy.
        """
        staging = self._stagings.pop(0)
        self._stagings.append(staging)
        staging.wait()
        _fill_columns(staging.columns, items)
        _fill_draws(staging, described)
        self._buffer.copy_(staging.buffer, non_blocking=True)
        self._copy_tables(staging, [item.request.block_ids for item in items])
        staging.mark()

    def batch(self, rows: int, max_context_len: int) -> ForwardBatch:
        """The first rows as a pass; no row counts as padding to the model.

        Everything views the buffers but token_ids, which are put together from what was staged
        and what the step before sampled: call this inside the capture.
        """
        staged, sources, positions, context_lens, host_slots, request_slots = self._columns[
            :, :rows
        ]
        sampled = self._sampled[sources.clamp(min=0).long()]
        return ForwardBatch(
            token_ids=torch.where(sources < 0, staged.long(), sampled),
            positions=positions,
            context_lens=context_lens,
            host_slots=HostSlots(host_slots),
            request_rows=self._rows[:rows],
            request_slots=request_slots,
            block_tables=self._tables[:rows],
            sampled_rows=self._rows[:rows].long(),
            max_context_len=max_context_len,
            num_context_rows=rows * max_context_len,
            num_real_tokens=rows,
        )

    def draws(self, rows: int) -> DrawInputs:
        """How the first rows are drawn."""
        return self._draw.rows(slice(0, rows))

    def _copy_tables(self, staging: _Staging, tables: list[list[int]]) -> None:
        """Copy the span of rows whose table on the device is another one or shorter."""
        changed = []
        for row, table in enumerate(tables):
            staging.follow(row, table)
            known, length = self._on_device[row]
            if known is not table or length < len(table):
                self._on_device[row] = (table, len(table))
                changed.append(row)
        if changed:
            span = slice(changed[0], changed[-1] + 1)
            self._tables[span].copy_(staging.tables[span], non_blocking=True)


def _fill_columns(columns: np.ndarray, items: Sequence[ScheduledRequest]) -> None:
    token_ids, sources, host_slots = [], [], []
    positions = [item.start for item in items]
    for item in items:
        request, at = item.request, item.start
        pending = at >= len(request.token_ids)
        token_ids.append(0 if pending else request.token_ids[at])
        sources.append(request.pending_row if pending else -1)
        host_slots.append(request.block_ids[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS)
    real = len(items)
    columns[:, real:] = np.array(list(_PADDING.values()))[:, None]
    columns[0, :real] = token_ids
    columns[1, :real] = sources
    columns[2, :real] = positions
    np.add(columns[2, :real], 1, out=columns[3, :real])
    columns[4, :real] = host_slots
    columns[5, :real] = [item.request.request_slot for item in items]


def _fill_draws(staging: _Staging, described: Sequence[Described]) -> None:
    staging.numbers[:] = np.array(GREEDY)[:, None]
    staging.ends[:] = -1
    if described:
        staging.numbers[:, : len(described)] = np.array([numbers for numbers, _ in described]).T
    for row, (_, ends) in enumerate(described):
        if ends:
            staging.ends[row, : len(ends)] = ends
