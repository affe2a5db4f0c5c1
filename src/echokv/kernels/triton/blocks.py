"""How the cache ops cut their tensors into blocks, and where their scratch lies.

An op that compacts counts per block in one kernel and sums the counts of the blocks before it in
the next: the order of its output is the order of its input, whatever runs first.
"""

import triton
import triton.language as tl

from echokv.kernels.cache_args import WORKSPACE_INTS

MAX_BLOCKS = 1024
_MIN_BLOCK = 1024

# The workspace: three areas of one count a block, the histograms of `free`, a few scalars.
COUNTS_A = 0
COUNTS_B = MAX_BLOCKS
COUNTS_C = 2 * MAX_BLOCKS
HISTOGRAMS = 3 * MAX_BLOCKS
HISTOGRAM_INTS = 4096
SCALARS = HISTOGRAMS + HISTOGRAM_INTS

assert SCALARS + 16 <= WORKSPACE_INTS


def block_size(entries: int) -> int:
    """Entries a program: at most MAX_BLOCKS programs cover them all."""
    return max(_MIN_BLOCK, triton.next_power_of_2(triton.cdiv(entries, MAX_BLOCKS)))


def grid_size(entries: int) -> tuple[int, int]:
    """Programs, and the power of two that holds a count from each."""
    programs = triton.cdiv(entries, block_size(entries))
    return programs, triton.next_power_of_2(programs)


@triton.jit
def sum_of_blocks(counts, programs, before, PROGRAMS: tl.constexpr):
    """Sum of counts[0 .. programs) and of counts[0 .. before)."""
    index = tl.arange(0, PROGRAMS)
    values = tl.load(counts + index, mask=index < programs, other=0)
    return tl.sum(values), tl.sum(tl.where(index < before, values, 0))


@triton.jit
def rank_in_block(flags):
    """How many entries of a block before this one are set; flags are int32 0 or 1."""
    return tl.cumsum(flags, axis=0) - flags
