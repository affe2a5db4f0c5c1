"""The ops of `FusedRecall`, together."""

from echokv.kernels.cuda.append import append_rows
from echokv.kernels.cuda.recall import make_resident
from echokv.kernels.cuda.victims import choose_victims

__all__ = ["append_rows", "choose_victims", "make_resident"]
