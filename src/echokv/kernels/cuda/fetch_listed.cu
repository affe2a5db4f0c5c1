// Fetching what the blocks of `index_scores` list as they make scores, beside them and the top-k.
#include "listed.cuh"

KERNEL(LISTED_THREADS, 1) void fetch_listed(ARGUMENTS ListedArguments a) {
  fetch_list(a, block_index(), grid_size(), thread_index());
}
