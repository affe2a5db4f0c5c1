"""A selection's addresses and scores; contract in `kernels/reference/name_rows.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.reference.name_rows import check_name_args
from echokv.memory.slots import BLOCK_TOKENS

_BLOCK = 512


def name_rows(
    positions: Tensor, scores: Tensor, request_rows: Tensor, block_tables: Tensor
) -> tuple[Tensor, Tensor]:
    """Host slots [T, k] and scores [T, k] of positions [T, k]."""
    check_name_args(positions, scores, request_rows, block_tables)
    rows, k = positions.shape
    slots = torch.empty_like(positions)
    chosen = torch.empty(rows, k, dtype=torch.float32, device=positions.device)
    if positions.numel():
        _name_rows[(triton.cdiv(k, _BLOCK), rows)](
            positions, scores, request_rows, block_tables, slots, chosen,
            k, scores.shape[1], block_tables.shape[1], BLOCK_TOKENS, _BLOCK,
        )  # fmt: skip
    return slots, chosen


@triton.jit
def _name_rows(
    positions,  # [T, k]
    scores,  # [T, width]
    request_rows,  # [T]
    block_tables,  # [R, num_blocks]
    slots,  # [T, k] out
    chosen,  # [T, k] out
    k,
    width,
    num_blocks,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (piece of k, row)."""
    row = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < k
    position = tl.load(positions + row * k + entry, mask=inside, other=-1)
    present = position >= 0
    table = block_tables + tl.load(request_rows + row).to(tl.int64) * num_blocks
    block = tl.load(table + position // TOKENS, mask=present, other=0)
    slot = tl.where(present, block * TOKENS + position % TOKENS, -1)
    score = tl.load(scores + row * width + position, mask=present, other=float("-inf"))
    tl.store(slots + row * k + entry, slot, mask=inside)
    tl.store(chosen + row * k + entry, score, mask=inside)


COMPILE_SIGNATURES = (
    (
        _name_rows,
        {"positions": "*i32", "scores": "*fp32", "request_rows": "*i32", "block_tables": "*i32",
         "slots": "*i32", "chosen": "*fp32", "k": "i32:16", "width": "i32:16", "num_blocks": "i32",
         "TOKENS": BLOCK_TOKENS, "BLOCK": _BLOCK},
    ),
)  # fmt: skip
