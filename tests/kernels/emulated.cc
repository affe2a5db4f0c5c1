// The kernels of kernels/cuda as a shared library for Python: same arguments, one CPU thread.
#include "prefetch.cuh"
#include "rows.cuh"
#include "topk.cu"
namespace recall {
#include "recall.cu"
}
namespace append {
#include "append.cu"
}
namespace touch {
#include "touch.cu"
}
namespace victims {
#include "victims.cu"
}

// What index_scores.cu does around its header, and fetch_listed.cu in a block of its own: warps that
// score, here by reading scores that are there already, and warps that fetch.
namespace prefetching {
struct Arguments {
  const i32* block_tables;
  const i32* request_rows;
  const float* scores;  // [rows, width]
  u32* shares;          // [blocks, 3] out
  i32* kth;             // [rows], which the fetching warps look at
  Listed* lists;        // [blocks, scoring, LIST]
  u32 blocks;           // a table
  u32 scoring;          // warps
  u32 known;            // whether they say in the end what the k-th scores are
  u32 pad;
  ListedArguments listed;
};

constexpr u32 MOST_SCORING = 8;
struct Shared {
  u32 listed[MOST_SCORING], scored;
};

static void score_page(const Arguments& a, const Run& run, u32 page, Listed* list, u32* count,
                       float threshold, u32 lane) {
  const i32* table = a.block_tables + u64(a.request_rows[run.row]) * a.blocks;
  for (u32 half = 0; half < PAGE_TOKENS; half += WARP) {
    const u32 position = page * PAGE_TOKENS + half + lane;
    const bool inside = position < run.tokens;
    const float score = inside ? a.scores[u64(run.row) * a.listed.contexts.width + position] : 0;
    list_candidates(list, count, inside && score >= threshold,
                    table[page] * i32(PAGE_TOKENS) + i32(half + lane), score, run.row,
                    *a.listed.epoch, lane);
  }
}

static void kernel(const Arguments& a) {
  Shared* shared = reinterpret_cast<Shared*>(shared_memory());
  const u32 thread = thread_index(), lane = thread % WARP, warp = thread / WARP;
  const PrefetchArguments& prefetch = a.listed.prefetch;
  const Contexts& contexts = a.listed.contexts;
  if (thread < MOST_SCORING) shared->listed[thread] = 0;
  if (thread == 0) shared->scored = 0;
  const Share share = share_of(contexts, block_index(), grid_size(), lane);
  block_sync();
  if (warp >= a.scoring) {
    fetch_list(a.listed, thread - a.scoring * WARP);
    return;
  }
  if (thread == 0) {
    const u32 found[3] = {share.row, share.page, share.pages};
    std::copy(found, found + 3, a.shares + 3 * block_index());
  }
  Listed* list = a.lists + u64(block_index() * a.scoring + warp) * LIST;
  u32 pages = 0;
  for (Run run = first_run(contexts, share); run.pages != 0; next_run(contexts, &run)) {
    const float threshold = threshold_of(prefetch.request_slots, prefetch.thresholds, run.row);
    for (u32 page = run.page; page < run.page + run.pages; page++)
      if (pages++ % a.scoring == warp)
        score_page(a, run, page, list, shared->listed + warp, threshold, lane);
  }
  end_list(list, shared->listed[warp], LISTED_THREADS / a.scoring, *a.listed.epoch, lane);
  if (!a.known || lane != 0 || atomicAdd(&shared->scored, 1u) + 1 != a.scoring) return;
  for (u32 row = 0; row < contexts.rows; row++) store_shared_value(a.kth + row, 0);
}
}  // namespace prefetching

extern "C" {
void run_prefetch(u32 blocks, u32 seed, u32 tick, const prefetching::Arguments* a) {
  emulated::launch(blocks, 1, a->scoring * WARP + LISTED_THREADS, 1, sizeof(prefetching::Shared),
                   seed, [=] { prefetching::kernel(*a); }, tick);
}
void run_topk(u32 blocks, u32 cluster, u32 shared, u32 seed, const TopkArguments* arguments) {
  emulated::launch(blocks, 1, TOPK_THREADS, cluster, shared, seed, [=] { topk(*arguments); });
}
void run_make_resident(u32 blocks, u32 shared, u32 seed,
                       const recall::ResidentArguments* arguments) {
  emulated::launch(blocks, 1, RECALL_THREADS, 1, shared, seed, [=] {
    if (blocks == u32(arguments->tiles))
      recall::make_resident(*arguments);
    else
      recall::make_many_resident(*arguments);
  });
}
void run_append_rows(u32 blocks, u32 shared, u32 seed, const append::AppendArguments* arguments) {
  emulated::launch(blocks, 1, RECALL_THREADS, 1, shared, seed,
                   [=] { append::append_rows(*arguments); });
}
void run_touch_pages(u32 blocks, u32 seed, const touch::TouchArguments* arguments) {
  emulated::launch(blocks, 1, 32, 1, 16, seed, [=] { touch::touch_pages(*arguments); });
}
void run_gather_rows(u32 blocks, u32 seed, const recall::GatherArguments* arguments) {
  emulated::launch(blocks, 1, RECALL_THREADS, 1, 16, seed,
                   [=] { recall::gather_rows(*arguments); });
}
void run_choose_victims(u32 blocks, u32 cluster, u32 shared, u32 seed,
                        const victims::VictimArguments* a) {
  emulated::launch(blocks, 1, VICTIM_THREADS, cluster, shared, seed,
                   [=] { victims::choose_victims(*a); });
}
}
