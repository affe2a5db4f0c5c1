"""Filled pools: bytes that the kernels could have written, the same in pools of any size."""

import torch

from echokv.bench.decode_fill import fill_index_keys, fill_rows
from echokv.kernels.registry import load_kernels
from echokv.memory.formats import IndexKeyFormat, RowFormat

CPU = torch.device("cpu")
KERNELS = load_kernels("reference", CPU)


def test_rows_decode_to_values_of_unit_variance() -> None:
    fmt = RowFormat(name="fp8_ds_mla", latent_dim=256, rope_dim=32)
    rows = torch.full((1500, fmt.row_bytes), 0xFF, dtype=torch.uint8)
    fill_rows(rows, 1, fmt, KERNELS, CPU, seed=3)
    values = KERNELS.decode_rows(rows, fmt, torch.float32)
    assert values.isfinite().all()
    assert abs(float(values.std()) - 1) < 0.02 and abs(float(values.mean())) < 0.02
    assert rows.unique(dim=0).shape[0] == 1500
    other_layer, smaller = rows.clone(), torch.zeros_like(rows[:1100])
    fill_rows(other_layer, 2, fmt, KERNELS, CPU, seed=3)
    fill_rows(smaller, 1, fmt, KERNELS, CPU, seed=3)
    assert not torch.equal(other_layer, rows)
    assert torch.equal(smaller, rows[:1100]), "a slot's row does not depend on the pool's size"


def test_index_keys_are_written_everywhere() -> None:
    fmt = IndexKeyFormat(name="fp8", head_dim=128)
    pages = torch.full((20, fmt.page_bytes), 0xFF, dtype=torch.uint8)
    fill_index_keys(pages, 0, fmt, KERNELS, CPU, seed=3)
    scales = pages[:, 64 * 128 :].contiguous().view(torch.float32)
    assert scales.isfinite().all() and (scales > 0).all()
    values = pages[:, : 64 * 128].contiguous().view(torch.float8_e4m3fn).float()
    keys = values.view(20, 64, 128) * scales[:, :, None]
    assert abs(float(keys.std()) - 1) < 0.02
    smaller = torch.zeros_like(pages[:17])
    fill_index_keys(smaller, 0, fmt, KERNELS, CPU, seed=3)
    assert torch.equal(smaller, pages[:17])
