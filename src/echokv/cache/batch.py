"""One forward pass as tensors: which tokens, where each lives, which request it belongs to.

Built by `engine.runner`; read by everything between the scheduler and the sampler. Rows may be
padding: they have context_len 0 and host slot -1, select nothing and write nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from echokv.memory.slots import BLOCK_TOKENS, NO_SLOT, HostSlots


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """The tokens of one forward pass. T tokens, R requests, B blocks a table, S sampled rows.

    Rows of one request are contiguous and in ascending position.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int32, 0 for padding
    context_lens: Tensor  # [T] int32: positions + 1; 0 for padding
    host_slots: HostSlots  # [T] int32: where this token's row goes; -1 for padding
    request_rows: Tensor  # [T] int32: row of block_tables; 0 for padding
    block_tables: Tensor  # [R, B] int32 host block ids in order; -1 past the end
    sampled_rows: Tensor  # [S] int64: rows whose logits are wanted
    max_context_len: int  # largest entry of context_lens, on the CPU
    num_context_rows: int  # most distinct rows that the pass can select or write; on the CPU
    num_real_tokens: int  # rows [0, num_real_tokens) are real, the rest padding; on the CPU

    @property
    def is_decode(self) -> bool:
        """Whether every row is a request's only one."""
        return self.num_tokens == self.block_tables.shape[0]

    @property
    def num_tokens(self) -> int:
        """Rows in this pass, padding included."""
        return self.token_ids.shape[0]


def positions_to_host_slots(
    positions: Tensor, request_rows: Tensor, block_tables: Tensor
) -> HostSlots:
    """Translate token positions to host slots through the block tables.

    Args:
        positions: [T, k] int32, -1 for none.
        request_rows: [T] int32, row of block_tables of each row of positions.
        block_tables: [R, B] int32 host block ids.

    Returns:
        [T, k] int32 host slots, -1 where positions is -1.
    """
    blocks = block_tables[request_rows.long()]  # [T, B]
    safe = positions.clamp(min=0).long()
    slots = blocks.gather(1, safe // BLOCK_TOKENS) * BLOCK_TOKENS + (safe % BLOCK_TOKENS)
    return HostSlots(torch.where(positions < 0, NO_SLOT, slots).to(torch.int32))
