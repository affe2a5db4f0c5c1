"""What a prefetch takes from this folder: `FusedPrefetch` of `kernels/protocol.py`."""

import torch
from torch import Tensor

from echokv.kernels.cuda import fetch_listed, index_scores, prefill_prefetch
from echokv.kernels.cuda import topk as selecting
from echokv.kernels.cuda.index_scores import fetches, index_scores_prefetch
from echokv.kernels.cuda.topk import topk_rows
from echokv.kernels.fused_layer import FusedLayer
from echokv.kernels.prefetch_args import CandidateLists
from echokv.memory.formats import IndexKeyFormat

__all__ = [
    "candidate_lists",
    "fetches",
    "index_scores_prefetch",
    "prefill_scores_prefetch",
    "topk_rows",
]


def candidate_lists(device: torch.device) -> CandidateLists:
    """Empty ones, for as many scoring blocks as there are SMs; loads the kernels that use them."""
    for module in (index_scores, fetch_listed, selecting):
        module.MODULE.load(device, module.KERNELS, beside=True)
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    shape = (blocks, fetch_listed.LISTS, fetch_listed.LIST_ENTRIES, 4)
    return CandidateLists(
        entries=torch.zeros(shape, dtype=torch.int32, device=device),
        epoch=torch.zeros(1, dtype=torch.int32, device=device),
    )


def prefill_scores_prefetch(
    query: Tensor,
    weights: Tensor,
    pages: Tensor,
    fmt: IndexKeyFormat,
    block_tables: Tensor,
    request_rows: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    shifts: Tensor,
    layer: FusedLayer,
    *,
    k: int,
    most: int,
) -> tuple[Tensor, Tensor]:
    """See `prefill_prefetch`; what `fetch_late` would need is left out."""
    tables = (block_tables, request_rows, context_lens, max_context_len)
    scores, found = prefill_prefetch.prefill_scores_prefetch(
        query, weights, pages, fmt, *tables, shifts, layer, k=k, most=most
    )
    return scores, found.host_slots
