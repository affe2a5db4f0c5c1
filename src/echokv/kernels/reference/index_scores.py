"""The lightning indexer's scores: every query token against every key of its request.

Rows of one request share the keys they read. Each row's result is the same bit for bit whatever
else is in the pass: see `_weighted_head_sum` and `GEMM_ROWS`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from echokv.kernels.checks import FLOATS, check_tensor
from echokv.kernels.reference.index_keys import (
    page_scales,
    page_values,
    quantise_ue8m0,
    rotate,
)
from echokv.memory.formats import IndexKeyFormat
from echokv.memory.slots import BLOCK_TOKENS, blocks_for

CHUNK_BLOCKS = 16
"""Blocks of keys scored at once: the intermediate of 32 rows x 32 heads stays in cache."""

GEMM_ROWS = 32
"""Rows of the product are padded to a multiple of this. MKL's sgemm takes another code path, with
other bits, for fewer than 8 rows, and splits 9 to 11 rows over two threads into such parts."""


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
    """score[t, s] = sum over heads of weights[t, h] * relu(query[t, h] . key[s] * D ** -0.5).

    The query is brought to the keys' format: rounded to bfloat16, or for fp8 rotated and quantised
    with one power-of-two scale a head, which folds into the weights; the keys' scales multiply
    after the sum over heads. Products accumulate in fp32. Keys are read up to the row's
    context_len only; what the pages hold past it does not matter.

    Args:
        query: [T, H, D] float.
        weights: [T, H] float32, already times H ** -0.5.
        pages: [n_pages, page_bytes] uint8 of one layer.
        fmt: the pages' format.
        block_tables: [R, B] int32 block ids in order; -1 past the end.
        request_rows: [T] int32, each row's row of block_tables.
        context_lens: [T] int32; 0 is a padding row.
        max_context_len: the largest of context_lens, known on the CPU.

    Returns:
        [T, W] float32, W = max_context_len rounded up to 64, at least 64; -inf at and past the
        row's context_len.
    """
    check_scores_args(
        query, weights, pages, fmt, block_tables, request_rows, context_lens, max_context_len
    )
    num_rows, width = query.shape[0], score_width(max_context_len)
    out = torch.full((num_rows, width), -torch.inf, device=query.device)
    vectors, weights = _query_in_format(query, weights, fmt)
    lens = context_lens.tolist()
    for first, last in _request_runs(request_rows.tolist(), lens):
        blocks = block_tables[int(request_rows[first])]
        run = slice(first, last)
        _score_run(vectors[run], weights[run], pages, fmt, blocks, max(lens[run]), out[run])
    past = torch.arange(width, device=out.device) >= context_lens[:, None]
    return out.masked_fill_(past, -torch.inf)


def score_width(max_context_len: int) -> int:
    """Columns of the result: max_context_len rounded up to whole blocks, at least one."""
    return max(1, blocks_for(max_context_len)) * BLOCK_TOKENS


def _query_in_format(query: Tensor, weights: Tensor, fmt: IndexKeyFormat) -> tuple[Tensor, Tensor]:
    """The query's values as fp32, and the weights with every constant factor folded in."""
    weights = weights * fmt.head_dim**-0.5
    if fmt.name == "fp8":
        values, scales = quantise_ue8m0(rotate(query))
        return values.float(), weights * scales
    dtype = torch.bfloat16 if fmt.name == "bfloat16" else torch.float32
    return query.to(dtype).float(), weights


def _request_runs(request_rows: list[int], lens: list[int]) -> Iterator[tuple[int, int]]:
    """[first, last) of each run of rows that belong to one request; padding rows are left out."""
    first = 0
    for row in range(1, len(lens) + 1):
        ends = row == len(lens) or request_rows[row] != request_rows[first]
        if ends or (lens[row] == 0) != (lens[first] == 0):
            if lens[first] > 0:
                yield first, row
            first = row


def _score_run(
    vectors: Tensor,
    weights: Tensor,
    pages: Tensor,
    fmt: IndexKeyFormat,
    blocks: Tensor,
    longest: int,
    out: Tensor,
) -> None:
    """Score rows of one request against its first `longest` keys, a chunk of keys at a time."""
    rows, heads, dim = vectors.shape
    flat = vectors.reshape(rows * heads, dim)
    padding = -flat.shape[0] % GEMM_ROWS
    flat = torch.nn.functional.pad(flat, (0, 0, 0, padding))
    num_blocks = blocks_for(longest)
    values = page_values(pages, fmt)
    for start in range(0, num_blocks, CHUNK_BLOCKS):
        ids = blocks[start : min(start + CHUNK_BLOCKS, num_blocks)].long()
        keys = values[ids].float().flatten(0, 1)  # [S, D]
        dots = torch.mm(flat, keys.T)[: rows * heads]  # [rows * H, S]
        scores = _weighted_head_sum(dots.view(rows, heads, -1), weights)  # [rows, S]
        if fmt.name == "fp8":
            scores *= page_scales(pages, fmt)[ids].flatten()
        at = start * BLOCK_TOKENS
        out[:, at : at + scores.shape[1]] = scores


def _weighted_head_sum(dots: Tensor, weights: Tensor) -> Tensor:
    """Sum over heads of weights * relu(dots), by halves; overwrites dots.

    A tree of plain elementwise sums: one rounding an operation, in an order that only the number
    of heads decides, so no row's bits depend on the shape around it.

    Args:
        dots: [rows, H, S] float32.
        weights: [rows, H] float32.

    Returns:
        [rows, S] float32, a view of dots.
    """
    dots.clamp_(min=0).mul_(weights[:, :, None])
    heads = dots.shape[1]
    while heads > 1:
        half = (heads + 1) // 2
        dots[:, : heads - half] += dots[:, half:heads]
        heads = half
    return dots[:, 0]


def check_scores_args(
    query: Tensor,
    weights: Tensor,
    pages: Tensor,
    fmt: IndexKeyFormat,
    block_tables: Tensor,
    request_rows: Tensor,
    context_lens: Tensor,
    max_context_len: int,
) -> None:
    """Raise ValueError unless `index_scores` can take these."""
    check_tensor("query", query, (None, None, fmt.head_dim), FLOATS)
    rows, heads, _ = query.shape
    device = query.device
    check_tensor("weights", weights, (rows, heads), torch.float32, device=device)
    check_tensor("pages", pages, (None, fmt.page_bytes), torch.uint8, device=device)
    check_tensor("block_tables", block_tables, (None, None), torch.int32, device=device)
    check_tensor("request_rows", request_rows, (rows,), torch.int32, device=device)
    check_tensor("context_lens", context_lens, (rows,), torch.int32, device=device)
    if not 0 <= max_context_len <= block_tables.shape[1] * BLOCK_TOKENS:
        raise ValueError(
            f"max_context_len {max_context_len} does not fit in block tables of"
            f" {block_tables.shape[1]} blocks of {BLOCK_TOKENS} tokens"
        )
