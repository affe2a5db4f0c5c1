// The kernels of kernels/cuda as a shared library for Python: same arguments, one CPU thread.
#include "prefill_prefetch.cuh"
#include "append.cuh"
#include "rows.cuh"
#include "topk.cu"
namespace recall {
#include "recall.cu"
}
namespace append {
#include "append.cu"
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

// What prefill_scores.cu does with its schedule: blocks note what they would score, and how far.
namespace tiling {
struct Arguments {
  Rows rows;
  u32* works;    // [blocks, most, 5] out: row, rows, tokens, unit, units
  u32* covered;  // [rows] out
  u32 most;
};

static void kernel(const Arguments& a) {
  const u32 lane = thread_index() % WARP;
  u32* noted = a.works + u64(block_index()) * a.most * 5;
  for (Work work = first_work(a.rows, block_index(), grid_size(), lane); work.units != 0;
       next_work(a.rows, &work)) {
    const Segment& segment = work.segment;
    const u32 found[5] = {segment.row, segment.rows, segment.tokens, work.unit, work.units};
    if (work.sequence >= a.most) std::abort();
    if (lane == 0) std::copy(found, found + 5, noted + 5 * work.sequence);
  }
  for (u32 row = block_index(); row < a.rows.contexts.rows; row += grid_size()) {
    const u32 tokens = covered_tokens(a.rows, row, lane);
    if (lane == 0) a.covered[row] = tokens;
  }
}
}  // namespace tiling

// What prefill_scores.cu does around its header: here warps score by copying scores that are given.
namespace inter {
struct Arguments {
  InterArguments prefetch;
  const float* given;  // [rows, width]
  float* scores;       // [rows, width] out
  u32 scoring, fetching;
};
struct Shared {
  u32 bins[TILE_ROWS][SCORE_BINS];
  u32 arrived, flushed, done;
};

static void score_work(const Arguments& a, Shared* shared, const Work& work, u32 first, u32 warp,
                       u32 lane) {
  const Rows& rows = a.prefetch.rows;
  for (u32 unit = work.unit; unit < work.unit + work.units; unit++) {
    if (unit % a.scoring != warp) continue;
    for (u32 i = 0; i < work.segment.rows; i++) {
      const u32 row = first + work.segment.row + i;
      for (u32 at = unit * UNIT_TOKENS + lane; at < (unit + 1) * UNIT_TOKENS; at += WARP) {
        if (at >= tokens_of(rows.contexts, row)) continue;
        const float score = a.given[u64(row) * rows.contexts.width + at];
        a.scores[u64(row) * rows.contexts.width + at] = score;
        const float shift = a.prefetch.shifts[rows.requests[row]];
        atomicAdd(&shared->bins[i][bin_of(score, shift)], 1u);
      }
    }
  }
}

static void wait_until(const u32* counter, u32 least) {
  while (load_from_block(counter) < least) pause();
}

static void kernel(const Arguments& a) {
  Shared* shared = reinterpret_cast<Shared*>(shared_memory());
  const u32 thread = thread_index(), lane = thread % WARP, warp = thread / WARP;
  const InterArguments& prefetch = a.prefetch;
  for (u32 at = thread; at < sizeof(Shared) / 4; at += (a.scoring + 1 + a.fetching) * WARP)
    reinterpret_cast<u32*>(shared)[at] = 0;
  block_sync();
  if (warp < a.scoring) {
    for_works<true>(prefetch.rows, block_index(), grid_size(), lane, [&](const Work& work, u32 first) {
      wait_until(&shared->flushed, work.sequence);
      score_work(a, shared, work, first, warp, lane);
      warp_sync();
      if (lane == 0) atomicAdd(&shared->arrived, 1u);
    });
    if (lane == 0) atomicAdd(&shared->done, 1u);
  } else if (warp == a.scoring) {
    for_works<true>(prefetch.rows, block_index(), grid_size(), lane, [&](const Work& work, u32 first) {
      wait_until(&shared->arrived, a.scoring * (work.sequence + 1));
      publish(prefetch, work, first, &shared->bins[0][0], lane, [&] {
        if (lane == 0) store_to_block(&shared->flushed, work.sequence + 1);
      });
    });
  } else {
    WaveNotes* notes = reinterpret_cast<WaveNotes*>(shared + 1) + warp - a.scoring - 1;
    const u32 mine = block_index() + grid_size() * (warp - a.scoring - 1);
    fetch_waves(prefetch, notes, mine, grid_size() * a.fetching, lane, [&] {
      const u32 done = lane == 0 ? load_from_block(&shared->done) : 0;
      return __shfl_sync(ALL_LANES, done, 0) == a.scoring;
    });
  }
}

static void fetch_late(const InterArguments& a) {
  const u32 warp = thread_index() / WARP;
  WaveNotes* notes = reinterpret_cast<WaveNotes*>(shared_memory()) + warp;
  fetch_waves(a, notes, block_index() + grid_size() * warp, grid_size() * 2, thread_index() % WARP,
              [] { return false; });
}
}  // namespace inter

extern "C" {
void run_tiling(u32 blocks, u32 seed, const tiling::Arguments* a) {
  emulated::launch(blocks, WARP, 1, 16, seed, [=] { tiling::kernel(*a); });
}
void run_inter(u32 blocks, u32 seed, const inter::Arguments* a) {
  const u32 shared = sizeof(inter::Shared) + a->fetching * sizeof(WaveNotes);
  emulated::launch(blocks, (a->scoring + 1 + a->fetching) * WARP, 1, shared, seed,
                   [=] { inter::kernel(*a); });
}
void run_inter_late(u32 blocks, u32 seed, const InterArguments* a) {
  emulated::launch(blocks, 2 * WARP, 1, 2 * sizeof(WaveNotes), seed,
                   [=] { inter::fetch_late(*a); });
}
void run_prefetch(u32 blocks, u32 seed, u32 tick, const prefetching::Arguments* a) {
  emulated::launch(blocks, a->scoring * WARP + LISTED_THREADS, 1, u32(sizeof(prefetching::Shared)),
                   seed, [=] { prefetching::kernel(*a); }, tick);
}
// Both at the same time, of as many threads a block; the second comes when its threads have paused
// so often.
void run_prefetch_beside_recall(u32 blocks, u32 recalling, u32 shared, u32 seed, u32 pauses,
                                const prefetching::Arguments* a,
                                const recall::ResidentArguments* resident) {
  const u32 threads = a->scoring * WARP + LISTED_THREADS, fetching = u32(sizeof(prefetching::Shared));
  if (threads != recall::WIDE_THREADS) std::abort();
  emulated::launch(
      blocks + recalling, threads, 1, shared > fetching ? shared : fetching, seed,
      [=] {
        if (!is_second_kernel()) return prefetching::kernel(*a);
        for (u32 i = 0; i < pauses; i++) pause();
        recall::make_many_resident_beside(*resident);
      },
      0, blocks);
}
void run_topk(u32 blocks, u32 cluster, u32 shared, u32 seed, const TopkArguments* arguments) {
  emulated::launch(blocks, TOPK_THREADS, cluster, shared, seed, [=] { topk(*arguments); });
}
void run_make_resident(u32 blocks, u32 threads, u32 shared, u32 seed, u32 one_tile,
                       const recall::ResidentArguments* arguments) {
  emulated::launch(blocks, threads, 1, shared, seed, [=] {
    const bool beside = threads == recall::WIDE_THREADS;
    if (one_tile)
      beside ? recall::make_resident_beside(*arguments) : recall::make_resident(*arguments);
    else
      beside ? recall::make_many_resident_beside(*arguments)
             : recall::make_many_resident(*arguments);
  });
}
void run_append_rows(u32 blocks, u32 shared, u32 seed, const append::AppendArguments* arguments) {
  emulated::launch(blocks, RECALL_THREADS, 1, shared, seed,
                   [=] { append::append_rows(*arguments); });
}
void run_gather_rows(u32 blocks, u32 seed, const recall::GatherArguments* arguments) {
  emulated::launch(blocks, RECALL_THREADS, 1, 16, seed,
                   [=] { recall::gather_rows(*arguments); });
}
void run_choose_victims(u32 blocks, u32 cluster, u32 shared, u32 seed,
                        const victims::VictimArguments* a) {
  emulated::launch(blocks, VICTIM_THREADS, cluster, shared, seed,
                   [=] { victims::choose_victims(*a); });
}
}
