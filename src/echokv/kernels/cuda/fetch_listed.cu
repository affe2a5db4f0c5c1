// Fetching what the blocks of `index_scores` list as they make scores, beside them and the top-k.
//
// One block an SM, small enough to share it with a block of either: see prefetch.cuh.
#include "prefetch.cuh"

constexpr u32 REGISTERS = 72;  // what `index_scores` leaves each of four warps on an SM

KERNEL(LISTED_THREADS, 65536 / (REGISTERS * LISTED_THREADS))
void fetch_listed(ARGUMENTS ListedArguments a) {
  fetch_list(a, shared_memory(), thread_index());
}
