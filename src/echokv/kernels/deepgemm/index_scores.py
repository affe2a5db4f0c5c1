"""DeepGEMM's paged logits for the indexer; contract of `kernels/reference/index_scores.py`.

Two things differ. Which keys each multiprocessor scores is decided once a pass, for all layers,
from the contexts' lengths. And what the result holds past a row's context is unspecified, which
the top-k ignores.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from echokv.kernels.checks import FLOATS, check_tensor
from echokv.kernels.libraries import load_deep_gemm
from echokv.kernels.reference.index_scores import score_width
from echokv.kernels.triton.index_keys import quantise_query
from echokv.memory.formats import IndexKeyFormat
from echokv.memory.slots import BLOCK_TOKENS

_WIDTH = 256  # its rows are padded to a multiple of this


@dataclass(frozen=True, kw_only=True)
class ScoreSchedule:
    """One pass's work, cut up for every multiprocessor, and each row's own block table."""

    work: Tensor  # [multiprocessors + 1, 2] int32
    tables: Tensor  # [T, B] int32
    context_lens: Tensor  # [T, 1] int32
    width: int  # of the result


class DeepGemmScores:
    """The paged logits and their schedule; nothing in either waits for the device."""

    def __init__(self) -> None:
        self._library = load_deep_gemm()

    def schedule(
        self,
        block_tables: Tensor,
        request_rows: Tensor,
        context_lens: Tensor,
        max_context_len: int,
    ) -> ScoreSchedule:
        """Cut up one pass; arguments as `index_scores` of the reference."""
        lens = context_lens[:, None].contiguous()
        work = self._library.get_paged_mqa_logits_metadata(
            lens, BLOCK_TOKENS, self._library.get_num_sms()
        )
        width = -(-score_width(max_context_len) // _WIDTH) * _WIDTH
        return ScoreSchedule(
            work=work,
            # Blocks past a context are read with the last ones: they must exist.
            tables=block_tables.index_select(0, request_rows).clamp_(min=0),
            context_lens=lens,
            width=width,
        )

    def index_scores(
        self,
        query: Tensor,
        weights: Tensor,
        pages: Tensor,
        fmt: IndexKeyFormat,
        schedule: ScoreSchedule,
    ) -> Tensor:
        """Scores of query [T, H, D] against each row's keys.

        Returns:
            [T, W] float32, W at least the pass's longest context; unspecified at and past the
            row's own context.
        """
        rows = schedule.context_lens.shape[0]
        check_tensor("query", query, (rows, None, fmt.head_dim), FLOATS)
        check_tensor("weights", weights, tuple(query.shape[:2]), torch.float32)
        check_tensor("pages", pages, (None, fmt.page_bytes), torch.uint8, device=query.device)
        values, folded = quantise_query(query, weights, fmt.head_dim)
        scores: Tensor = self._library.fp8_paged_mqa_logits(
            values[:, None],
            pages.view(-1, BLOCK_TOKENS, 1, fmt.key_bytes),
            folded,
            schedule.context_lens,
            schedule.tables,
            schedule.work,
            schedule.width,
        )
        return scores
