"""One forward pass as tensors: which tokens, where each lives, which request it belongs to.

Built by `engine.runner`; read by everything between the scheduler and the sampler. Rows may be
padding: they have context_len 0 and host slot -1, select nothing and write nothing.
"""

from dataclasses import dataclass

from torch import Tensor

from echokv.memory.slots import HostSlots


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The requests of a pass that isn't a decode pass, in the order of its block tables."""

    request_slots: Tensor  # [R] int64
    last_rows: Tensor  # [R] int64: row of each one's last token


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """The tokens of one forward pass. T tokens, R requests, B blocks a table, S sampled rows.

    Rows of one request are contiguous and in ascending position. A decode pass, one token a
    request, has request_slots; others may have chunks.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int32, 0 for padding
    context_lens: Tensor  # [T] int32: positions + 1; 0 for padding
    host_slots: HostSlots  # [T] int32: where this token's row goes; -1 for padding
    request_rows: Tensor  # [T] int32: row of block_tables; 0 for padding
    request_slots: Tensor | None  # [T] int32, -1 for padding; None: no decode pass
    block_tables: Tensor  # [R, B] int32 host block ids in order; -1 past the end
    sampled_rows: Tensor  # [S] int64: rows whose logits are wanted
    max_context_len: int  # largest entry of context_lens, on the CPU
    num_context_rows: int  # most distinct rows that the pass can select or write; on the CPU
    num_real_tokens: int  # rows [0, num_real_tokens) are real, the rest padding; on the CPU
    chunks: Chunks | None = None  # None: a decode pass, or one that neither predicts nor learns

    @property
    def is_decode(self) -> bool:
        """Whether every real row is its request's only one."""
        return self.request_slots is not None

    @property
    def num_tokens(self) -> int:
        """Rows in this pass, padding included."""
        return self.token_ids.shape[0]


def fits_at_once(num_tokens: int, topk: int, context_rows: int, capacity: int) -> bool:
    """Whether all that a pass may select surely fits the device pool beside its new rows.

    Args:
        num_tokens: real rows of the pass.
        topk: entries of a selection.
        context_rows: most distinct rows that the pass can select or write.
        capacity: device slots a layer.
    """
    return min(num_tokens * (topk + 1), context_rows) <= capacity
