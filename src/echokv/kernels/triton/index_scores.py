"""The lightning indexer's scores; contract in `kernels/reference/index_scores.py`.

Portable: one program scores one row against a few pages. Rows of one request read the same pages
through the L2 cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.reference.index_scores import check_scores_args, score_width
from echokv.kernels.triton.index_keys import quantise_query
from echokv.kernels.triton.numerics import dot, round_to
from echokv.memory.formats import IndexKeyFormat
from echokv.memory.slots import BLOCK_TOKENS

_PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PAGES_PER_PROGRAM = 4
_SMALLEST_DOT = 32  # the least K of an fp8 dot; M and N need 16


def index_scores(
    query: Tensor,
    weights: Tensor,
    pages: Tensor,
    fmt: IndexKeyFormat,
    block_tables: Tensor,
    request_rows: Tensor,
    context_lens: Tensor,
    max_context_len: int,
) -> Tensor:
    """Scores of query [T, H, D] against each row's keys: [T, W] float32, -inf past the context."""
    check_scores_args(
        query, weights, pages, fmt, block_tables, request_rows, context_lens, max_context_len
    )
    tokens, heads, dim = query.shape
    width = score_width(max_context_len)
    out = torch.empty(tokens, width, dtype=torch.float32, device=query.device)
    if tokens == 0:
        return out
    is_fp8 = fmt.name == "fp8"
    factor = dim**-0.5
    if is_fp8:
        query, weights = quantise_query(query, weights, dim)
        factor = 1.0  # folded into the weights
    block_dim = max(_SMALLEST_DOT, triton.next_power_of_2(dim))
    values = pages.view(torch.float8_e4m3fn if is_fp8 else _PLAIN[fmt.name])
    grid = (triton.cdiv(width // BLOCK_TOKENS, _PAGES_PER_PROGRAM), tokens)
    _index_scores[grid](
        query,
        weights,
        values,
        pages.view(torch.float32),
        block_tables,
        request_rows,
        context_lens,
        out,
        factor,
        heads,
        dim,
        block_tables.shape[1],
        width,
        values.shape[1],
        fmt.page_bytes // 4,
        BLOCK_TOKENS,
        _PAGES_PER_PROGRAM,
        max(16, triton.next_power_of_2(heads)),
        block_dim,
        _chunk_dim(fmt.name, block_dim),
        is_fp8,
        num_warps=_num_warps(fmt.name),
    )
    return out


def _chunk_dim(name: str, block_dim: int) -> int:
    """How much of the head dimension is multiplied at once; all of it but in fp32.

    fp32 products are not done by tensor cores: every operand sits in registers, and spills.
    """
    return 16 if name == "float32" else block_dim


def _num_warps(name: str) -> int:
    return 8 if name == "float32" else 4


@triton.jit
def _in_dtype(q, dtype: tl.constexpr):
    """A query in the keys' dtype; e4m3 it is already."""
    if dtype == tl.float8e4nv:
        return q
    return round_to(q.to(tl.float32), dtype)


@triton.jit
def _index_scores(
    query,  # [T, H, D]; e4m3 already when the pages are
    weights,  # [T, H]
    values,  # [n_pages, page_values] keys in the pages' dtype
    scales,  # [n_pages, page_scales] the same bytes as fp32
    block_tables,  # [R, B]
    request_rows,  # [T]
    context_lens,  # [T]
    out,  # [T, width]
    factor,  # on the weights
    heads,
    dim,
    num_blocks,
    width,
    page_values,
    page_scales,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CHUNK_DIM: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Program (group of pages, row). A page's sums depend on nothing but that page and row."""
    row = tl.program_id(1).to(tl.int64)
    first_page = tl.program_id(0) * PAGES
    length = tl.load(context_lens + row)
    table = block_tables + tl.load(request_rows + row).to(tl.int64) * num_blocks
    key = tl.arange(0, PAGE)[:, None]
    head = tl.arange(0, BLOCK_HEADS)
    chunk = tl.arange(0, CHUNK_DIM)[None, :]
    query_row = query + row * heads * dim + head[:, None] * dim + chunk
    if first_page * PAGE < length:
        w = tl.load(weights + row * heads + head, mask=head < heads, other=0.0) * factor
        q_mask = (head[:, None] < heads) & (chunk < dim)
        q = _in_dtype(tl.load(query_row, mask=q_mask, other=0.0), values.dtype.element_ty)
        for i in range(PAGES):
            page = first_page + i
            position = page * PAGE + tl.arange(0, PAGE)
            # A page past the context need not exist: read none, and mask what comes of it.
            exists = page * PAGE < length
            page_id = tl.load(table + page, mask=exists, other=0).to(tl.int64)
            keys = values + page_id * page_values + key * dim + chunk
            if CHUNK_DIM == BLOCK_DIM:
                k = tl.load(keys, mask=exists & (chunk < dim), other=0.0)  # [S, D]
                dots = dot(k, tl.trans(q))  # [S, H]
            else:
                dots = tl.zeros((PAGE, BLOCK_HEADS), tl.float32)
                for start in range(0, BLOCK_DIM, CHUNK_DIM):
                    inside = start + chunk < dim
                    k = tl.load(keys + start, mask=exists & inside, other=0.0)
                    part_mask = (head[:, None] < heads) & inside
                    part = tl.load(query_row + start, mask=part_mask, other=0.0)
                    dots += dot(k, tl.trans(_in_dtype(part, values.dtype.element_ty)))
            score = tl.sum(tl.maximum(dots, 0.0) * w[None, :], axis=1)
            if IS_FP8:
                at = page_id * page_scales + PAGE * dim // 4 + tl.arange(0, PAGE)
                score = score * tl.load(scales + at, mask=position < length, other=0.0)
            score = tl.where(position < length, score, float("-inf"))
            tl.store(out + row * width + position, score, mask=position < width)
    else:
        all_positions = first_page * PAGE + tl.arange(0, PAGES * PAGE)
        nothing = tl.full((PAGES * PAGE,), float("-inf"), tl.float32)
        tl.store(out + row * width + all_positions, nothing, mask=all_positions < width)


def _signature(name: str, query: str, values: str) -> tuple[object, ...]:
    pointers = {"query": query, "weights": "*fp32", "values": values, "scales": "*fp32"}
    pointers |= dict.fromkeys(("block_tables", "request_rows", "context_lens"), "*i32")
    sizes = ("heads", "dim", "num_blocks", "width", "page_values", "page_scales")
    signature = {
        **pointers,
        "out": "*fp32",
        "factor": "fp32",
        **dict.fromkeys(sizes, "i32:16"),
        "num_blocks": "i32",
        "PAGE": BLOCK_TOKENS,
        "PAGES": _PAGES_PER_PROGRAM,
        "BLOCK_HEADS": 64,
        "BLOCK_DIM": 128,
        "CHUNK_DIM": _chunk_dim(name, 128),
        "IS_FP8": name == "fp8",
    }
    return _index_scores, signature, {"num_warps": _num_warps(name)}


COMPILE_SIGNATURES = (
    _signature("fp8", "*fp8e4nv", "*fp8e4nv"),
    _signature("bfloat16", "*bf16", "*bf16"),
    _signature("bfloat16", "*fp32", "*bf16"),
    _signature("float32", "*fp32", "*fp32"),
)
