"""Products with block-quantised fp8 weights; contracts in `kernels/reference/fp8_linear.py`."""

from torch import Tensor

from echokv.kernels.reference.fp8_linear import check_fp8_args
from echokv.kernels.triton.fp8_product import MANY_ROWS, MANY_ROWS_GATED, Tiles, product

_SMS = 132
"""Programs wanted at least where the sum may be split: Hopper's multiprocessors."""


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
    if rows > 64:
        return MANY_ROWS_GATED if gated else MANY_ROWS
    height = 16 if rows <= 16 else 32 if rows <= 32 else 64
    for block in (64, 32, 16):
        if columns // block >= _SMS:
            break
    return Tiles(rows=height, columns=block, stages=6)
