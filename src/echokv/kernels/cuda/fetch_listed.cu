// Fetching what the blocks of `index_scores` list as they make scores, beside them and the top-k.
#include "listed.cuh"

KERNEL(LISTED_THREADS, 1) void fetch_listed(ARGUMENTS ListedArguments a) {
  const u32 blocks = cluster_size();
  fetch_list(a, block_index() / blocks, grid_size() / blocks, thread_index());
}
