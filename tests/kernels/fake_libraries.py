"""DeepGEMM and FlashMLA as plain PyTorch: their calling conventions, without their kernels.

Layout rules are those that sgl-deep-gemm 0.1.5.post1 and sgl-flash-mla 1.0.0 assert; rows that the
real kernels leave alone stay as they were.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from echokv.kernels.reference.fp8_linear import dequantise, dequantise_blocks
from echokv.kernels.reference.index_keys import page_scales, page_values
from echokv.kernels.reference.sparse_mla import sparse_mla
from echokv.memory.formats import IndexKeyFormat, RowFormat

Scaled = tuple[Tensor, Tensor]


def check_scales(x: Scaled) -> None:
    """Scales of activations lie column by column, each padded to 16 bytes."""
    values, scales = x
    assert values.is_contiguous() and values.dtype == torch.float8_e4m3fn
    assert scales.shape == (*values.shape[:-1], values.shape[-1] // 128)
    assert scales.stride(-2) == 1 or scales.shape[-2] == 1
    assert scales.stride(-1) == -(-scales.shape[-2] // 4) * 4
    assert scales.dim() == 2 or scales.stride(0) == scales.stride(-1) * scales.shape[-1]


def multiply(x: Scaled, weight: Scaled) -> Tensor:
    return (dequantise(*x) @ dequantise_blocks(*weight).T).bfloat16()


def fp8_gemm_nt(x: Scaled, weight: Scaled, out: Tensor) -> None:
    check_scales(x)
    out.copy_(multiply(x, weight))


def fp8_m_grouped_gemm_nt_masked(
    x: Scaled, weight: Scaled, out: Tensor, counts: Tensor, expected: int
) -> None:
    """Like the library's: a tile writes all its rows, so that an expert needs whole tiles."""
    check_scales(x)
    assert counts.dtype == torch.int32 and expected >= 1
    assert out.shape[1] % 128 == 0
    for expert, count in enumerate(counts.tolist()):
        out[expert, count : -(-count // 128) * 128] = torch.nan
        one = (x[0][expert, :count], x[1][expert, :count])
        out[expert, :count] = multiply(one, (weight[0][expert], weight[1][expert]))


def m_grouped_fp8_gemm_nt_contiguous(
    x: Scaled, weight: Scaled, out: Tensor, experts: Tensor
) -> None:
    check_scales(x)
    assert experts.dtype == torch.int32 and experts.shape == x[0].shape[:1]
    for start in range(0, len(experts), 128):
        block = slice(start, start + 128)
        expert = int(experts[start])
        assert (experts[block] == expert).all()
        if expert >= 0:
            one = (x[0][block], x[1][block])
            out[block] = multiply(one, (weight[0][expert], weight[1][expert]))


def fp8_paged_mqa_logits(
    query: Tensor,
    pages: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    tables: Tensor,
    schedule: Tensor,
    width: int,
) -> Tensor:
    fmt = IndexKeyFormat(name="fp8", head_dim=128)
    assert query.shape[1:] == (1, weights.shape[1], 128) and query.dtype == torch.float8_e4m3fn
    assert pages.shape[1:] == (64, 1, 132) and pages.dtype == torch.uint8
    assert context_lens.shape == (len(query), 1) and tables.shape[0] == len(query)
    assert torch.equal(schedule, context_lens), "made from another pass's lengths"
    assert (tables >= 0).all()
    flat = pages.view(len(pages), -1)
    out = torch.full((len(query), -(-width // 256) * 256), torch.nan)[:, :width]
    for row, length in enumerate(context_lens[:, 0].tolist()):
        ids = tables[row, : -(-length // 64)].long()
        keys = page_values(flat[ids], fmt).float().flatten(0, 1)
        dots = torch.relu(query[row, 0].float() @ keys.T) * weights[row][:, None]
        out[row, : len(keys)] = dots.sum(0) * page_scales(flat[ids], fmt).flatten()
        out[row, length:] = torch.nan
    return out


DEEP_GEMM = SimpleNamespace(
    fp8_gemm_nt=fp8_gemm_nt,
    fp8_m_grouped_gemm_nt_masked=fp8_m_grouped_gemm_nt_masked,
    m_grouped_fp8_gemm_nt_contiguous=m_grouped_fp8_gemm_nt_contiguous,
    fp8_paged_mqa_logits=fp8_paged_mqa_logits,
    get_paged_mqa_logits_metadata=lambda lens, block, sms: lens.clone(),
    get_num_sms=lambda: 132,
)


def flash_mla_with_kvcache(
    query: Tensor,
    rows: Tensor,
    table: None,
    lens: None,
    latent_dim: int,
    schedule: dict[str, Any],
    *,
    softmax_scale: float,
    is_fp8_kvcache: bool,
    indices: Tensor,
    use_legacy: bool,
) -> tuple[Tensor, None]:
    assert table is None and lens is None and is_fp8_kvcache and use_legacy
    assert rows.shape[1:] == (1, 1, 656) and latent_dim == 512
    assert query.shape[1] == 1 and query.shape[2] in (64, 128) and query.dtype == torch.bfloat16
    assert indices.shape[1] == 1 and indices.shape[2] % 64 == 0
    shape = (*query.shape, indices.shape[2])
    assert schedule.setdefault("shape", shape) == shape, "a schedule of another shape"
    fmt = RowFormat(name="fp8_ds_mla", latent_dim=512, rope_dim=64)
    out = sparse_mla(query[:, 0], rows.view(-1, 656), indices[:, 0], fmt, softmax_scale)
    return out[:, None], None


FLASH_MLA = SimpleNamespace(
    flash_mla_with_kvcache=flash_mla_with_kvcache, get_mla_metadata=lambda: ({}, None)
)
