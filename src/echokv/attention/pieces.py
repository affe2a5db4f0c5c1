"""How a pass that selects too many rows at once is cut into pieces that don't.

Neighbouring queries select much the same rows, and a row that a piece selects twice takes one
place: pieces are as long as their *distinct* rows allow, which is often many times what the worst
case would. Counting them waits for the device, once a layer, and once more where there is more than
one piece: prefill can, decode never gets here.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a pass, and how many distinct rows they select at most."""

    rows: slice
    distinct: int


def plan_pieces(
    host_slots: Tensor, capacity: int, context_rows: int, pool_slots: int
) -> list[Piece]:
    """Cut a pass into pieces that each select at most so many rows.

    Pieces consist of blocks of capacity // k rows, which fit whatever they select, and are as long
    as they can be, from the first on.

    Args:
        host_slots: [T, k] int32, what each row selects, -1 where it selects fewer.
        capacity: distinct rows that one piece may select; at least k.
        context_rows: most distinct rows that the pass can select; where they fit, nothing waits.
        pool_slots: N_H; every host slot is below it.

    Returns:
        Pieces in order; together they are [0, T).
    """
    num_rows, topk = host_slots.shape
    step, most = capacity // topk, min(context_rows, num_rows * topk)
    if most > capacity:
        most = _distinct(host_slots, pool_slots)
    if most <= capacity:
        return [Piece(slice(0, num_rows), most)]
    fresh = fresh_rows(host_slots, step)
    pieces: list[Piece] = []
    first, distinct = 0, 0
    for block in range(len(fresh)):
        more = int(fresh[block, first])
        if distinct + more > capacity:
            pieces.append(Piece(slice(first * step, block * step), distinct))
            first, distinct, more = block, 0, int(fresh[block, block])
        distinct += more
    pieces.append(Piece(slice(first * step, num_rows), distinct))
    return pieces


def _distinct(host_slots: Tensor, pool_slots: int) -> int:
    """How many host slots there are; far cheaper than to sort them, and waits once."""
    seen = torch.zeros(pool_slots + 1, dtype=torch.bool, device=host_slots.device)
    seen.index_fill_(0, host_slots.flatten().long(), True)  # -1 wraps to the spare entry
    return int(seen[:-1].sum())


def fresh_rows(host_slots: Tensor, step: int) -> NDArray[np.int32]:
    """How many rows each block of `step` rows selects that no block since some other one has.

    Args:
        host_slots: [T, k] int32, -1 where a row selects fewer.
        step: rows of a block.

    Returns:
        [B, B], B = ceil(T / step). Entry [b, a], a <= b: distinct host slots of
        block b that none of the blocks a to b - 1 selects; others have no meaning.
    """
    num_rows, _ = host_slots.shape
    blocks = -(-num_rows // step)
    block = torch.arange(num_rows, device=host_slots.device)[:, None] // step
    # Sorted by slot, then block: the entry before the first of a pair (slot, block) says which
    # block selected that slot last.
    pairs = torch.where(host_slots < 0, -1, host_slots.long() * blocks + block)
    pairs = pairs.flatten().sort().values
    before = torch.cat([pairs.new_full((1,), -1), pairs[:-1]])
    new = pairs != before
    same_slot = pairs // blocks == before // blocks
    since = torch.where(same_slot, before % blocks + 1, 0)  # 0: by none, 1: by block 0, ...
    nowhere = blocks * (blocks + 1)
    cells = torch.where(new & (pairs >= 0), pairs % blocks * (blocks + 1) + since, nowhere)
    counts = cells.bincount(minlength=nowhere + 1)[:nowhere].view(blocks, blocks + 1)
    return counts.cumsum(1, dtype=torch.int32)[:, :blocks].cpu().numpy()
