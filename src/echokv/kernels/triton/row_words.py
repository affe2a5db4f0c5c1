"""Rows as words: the widest integers that divide a row, for kernels that only move bytes."""

import torch
import triton
from torch import Tensor

ROWS_PER_PROGRAM = 4
"""Rows that a program moves at a time, a warp each."""


def as_words(rows: Tensor) -> Tensor:
    """View [n, row_bytes] uint8 as int32 words where rows and the base address allow it."""
    if rows.shape[1] % 4 == 0 and rows.data_ptr() % 4 == 0:
        return rows.view(torch.int32)
    return rows


def padded_words(words: Tensor) -> int:
    """The power of two that holds a row's words."""
    return int(triton.next_power_of_2(words.shape[1]))
