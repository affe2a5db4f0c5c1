"""What a prefetch takes from this folder: `FusedPrefetch` of `kernels/protocol.py`."""

from echokv.kernels.cuda.fetch_listed import candidate_lists
from echokv.kernels.cuda.index_scores import fetches, index_scores_prefetch
from echokv.kernels.cuda.topk import topk

__all__ = ["candidate_lists", "fetches", "index_scores_prefetch", "topk"]
