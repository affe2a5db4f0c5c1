"""What a prefetch takes from this folder: `FusedPrefetch` of `kernels/protocol.py`."""

import torch

from echokv.kernels.cuda import fetch_listed, index_scores
from echokv.kernels.cuda import topk as selecting
from echokv.kernels.cuda.index_scores import fetches, index_scores_prefetch
from echokv.kernels.cuda.prefill_prefetch import prefill_scores_prefetch
from echokv.kernels.cuda.topk import topk_rows
from echokv.kernels.prefetch_args import CandidateLists

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
