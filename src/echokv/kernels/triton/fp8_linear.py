"""Products with block-quantised fp8 weights; contracts in `kernels/reference/fp8_linear.py`."""

from torch import Tensor

from echokv.kernels.reference.fp8_linear import FP8_BLOCK, check_fp8_args
from echokv.kernels.triton.fp8_product import MANY_ROWS, MANY_ROWS_GATED, Tiles, product

_FEW_ROWS = 64
"""Rows of x up to which memory sets the pace."""

_VERY_FEW_ROWS = 16
"""Rows of x that fit one instruction's: tiles of 128 weights are then faster than of 64."""

_PROGRAMS = 400
"""Programs wanted where the sum may be split: about three for each of Hopper's multiprocessors."""

_LEAST_STEPS = 7
"""Blocks of 128 columns that a split has at least: below, its start costs more than it saves."""

_LONG_SUM = 28
"""Blocks from which a sum is split at all: adding the parts costs a launch."""


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x [..., K] @ weight [N, K].T, both in e4m3 with their scales: [..., N]."""
    check_fp8_args(x, weight, scale)
    return _over_rows(x, weight, scale, gated=False)


def fp8_gate_up(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T) of weight [2 * I, K]: [..., I]."""
    check_fp8_args(x, weight, scale, gated=True)
    return _over_rows(x, weight, scale, gated=True)


def _over_rows(x: Tensor, weight: Tensor, scale: Tensor, *, gated: bool) -> Tensor:
    rows = x.view(-1, x.shape[-1])
    columns = weight.shape[0] // (2 if gated else 1)
    if rows.shape[0] == 0:
        return x.new_empty(*x.shape[:-1], columns)
    tiles = linear_tiles(rows.shape[0], columns, weight.shape[1], gated=gated)
    return product(rows, weight, scale, tiles, gated=gated).view(*x.shape[:-1], columns)


def linear_tiles(rows: int, columns: int, width: int, *, gated: bool) -> Tiles:
    """Tiles of a product of so many rows of x with a weight [columns, width]."""
    if rows > _FEW_ROWS:
        return MANY_ROWS_GATED if gated else MANY_ROWS
    outputs = columns * (2 if gated else 1)  # of the weight: where a sum is split, gate and up both
    if rows <= _VERY_FEW_ROWS:
        splits = _splits_of_few(outputs, width // FP8_BLOCK)
        return Tiles(rows=16, columns=128 if splits > 1 else 64, splits=splits, swapped=True)
    blocks, programs = width // FP8_BLOCK, -(-outputs // 64)
    splits = 1
    while (
        blocks >= _LONG_SUM
        and programs * splits < _PROGRAMS
        and blocks % (2 * splits) == 0
        and blocks // (2 * splits) >= _LEAST_STEPS
    ):
        splits *= 2
    return Tiles(
        rows=32 if rows <= 32 else 64, columns=64, splits=splits, swapped=True, quantised=True
    )


def _splits_of_few(outputs: int, blocks: int) -> int:
    """Parts of a sum over so many blocks, in tiles of 128 weights; the fewest that fill the GPU.

    Measured on an H200 with the sizes of DeepSeek-V3.2, at 1 and 13 rows.
    """
    least = 4 if blocks >= _LONG_SUM else 8  # blocks of a part
    programs, splits = -(-outputs // 128), 1
    for parts in range(2, blocks // least + 1):
        if programs * splits >= 200:
            break
        if blocks % parts == 0:
            splits = parts
    return splits
