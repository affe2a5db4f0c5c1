// Fetching rows that beat a prediction, from scores that are there already, beside the top-k.
//
// Every warp looks through an equal share of all pages (schedule.cuh), several at once, looks up who
// is absent, and collects those in a queue of its own in shared memory. A full queue, and what is
// left at the end, goes through budgets, lists and claims as in prefetch.cuh: most of what a row
// takes is waiting for memory, so many rows wait together. Nobody waits for another warp.
#include "prefetch.cuh"

#ifndef AHEAD_THREADS
#define AHEAD_THREADS 256
#endif
constexpr u32 THREADS = AHEAD_THREADS;
constexpr u32 WARPS = THREADS / WARP;
constexpr u32 PAGES_AT_ONCE = 4;
constexpr u32 PARTS = PAGES_AT_ONCE * PAGE_TOKENS / WARP;  // scores of a lane
constexpr u32 QUEUE = 2 * WARP;

struct AheadArguments {
  PrefetchArguments prefetch;
  Contexts contexts;
  const float* scores;      // [rows, width]
  const i32* block_tables;  // [requests, blocks]
  const i32* request_rows;  // [rows]
  u32 blocks;
  u32 pad;
};

struct Queue {
  i32 host_slots[QUEUE];
  float scores[QUEUE];
  u32 rows[QUEUE];
};

static_assert(sizeof(Queue) == 12 * 64, "fetch_ahead.py asks for this");

// Absent rows that beat the prediction, not yet fetched; one warp's.
struct Waiting {
  Queue* queue;
  u32 count;
};

DEVICE void put(Waiting* waiting, bool absent, i32 host_slot, float score, u32 row, u32 lane) {
  const u32 chosen = __ballot_sync(ALL_LANES, absent);
  const u32 at = waiting->count + __popc(chosen & ((1u << lane) - 1));
  if (absent) {
    waiting->queue->host_slots[at] = host_slot;
    waiting->queue->scores[at] = score;
    waiting->queue->rows[at] = row;
  }
  waiting->count += __popc(chosen);
}

// Fetch the last of them, at most one a lane.
DEVICE void fetch_last(const AheadArguments& a, Waiting* waiting, i32 floor, Fetched* fetched,
                       u32 lane) {
  warp_sync();
  const u32 taken = smaller(waiting->count, WARP);
  waiting->count -= taken;
  Candidate candidate = {lane < taken, NONE, 0, 0};
  if (candidate.valid) {
    const u32 at = waiting->count + lane;
    candidate = {true, waiting->queue->host_slots[at], waiting->queue->scores[at],
                 waiting->queue->rows[at]};
  }
  warp_sync();
  const u32 at = put_on_list(a.prefetch, a.contexts, candidate, lane);
  const bool wants = at != ALL_LANES;
  take_in(a.prefetch, wants, candidate.host_slot, wants ? at : 0, floor, fetched, lane);
}

// Some pages of a run, at most PAGES_AT_ONCE of them.
DEVICE void look_through(const AheadArguments& a, const Run& run, u32 page, float threshold,
                         const i32* table, Waiting* waiting, i32 floor, Fetched* fetched,
                         u32 lane) {
  const float* scores = a.scores + u64(run.row) * a.contexts.width;
  const u32 end = run.page + run.pages;
  float score[PARTS];
  i32 host_slot[PARTS], found[PARTS];
#pragma unroll
  for (u32 i = 0; i < PARTS; i++) {
    const u32 position = page * PAGE_TOKENS + i * WARP + lane;
    const bool inside = page + i * WARP / PAGE_TOKENS < end && position < run.tokens;
    score[i] = inside ? scores[position] : bits_float(0x7fc00000u);
  }
#pragma unroll
  for (u32 i = 0; i < PARTS; i++) {
    const bool beats = score[i] >= threshold;
    const u32 offset = i * WARP % PAGE_TOKENS + lane;
    host_slot[i] =
        beats ? table[page + i * WARP / PAGE_TOKENS] * i32(PAGE_TOKENS) + i32(offset) : NONE;
  }
#pragma unroll
  for (u32 i = 0; i < PARTS; i++)
    found[i] = host_slot[i] >= 0
                   ? load_shared_value(a.prefetch.layer.host_to_device + host_slot[i])
                   : 0;
#pragma unroll
  for (u32 i = 0; i < PARTS; i++) {
    put(waiting, found[i] < 0, host_slot[i], score[i], run.row, lane);
    if (waiting->count > QUEUE - WARP) fetch_last(a, waiting, floor, fetched, lane);
  }
}

KERNEL(AHEAD_THREADS, 2) void fetch_ahead(ARGUMENTS AheadArguments a) {
  const u32 thread = thread_index(), lane = thread % WARP, warp = thread / WARP;
  Waiting waiting = {reinterpret_cast<Queue*>(shared_memory()) + warp, 0};
  const i32 floor = *a.prefetch.layer.floor;
  Fetched fetched = {0, 0};
  const Share share =
      share_of(a.contexts, warp * grid_size() + block_index(), WARPS * grid_size(), lane);
  for (Run run = first_run(a.contexts, share); run.pages != 0; next_run(a.contexts, &run)) {
    const float threshold = threshold_of(a.prefetch, run.row);
    if (!(threshold == threshold)) continue;
    const i32* table = a.block_tables + u64(u32(a.request_rows[run.row])) * a.blocks;
    for (u32 page = run.page; page < run.page + run.pages; page += PAGES_AT_ONCE)
      look_through(a, run, page, threshold, table, &waiting, floor, &fetched, lane);
  }
  while (waiting.count != 0) fetch_last(a, &waiting, floor, &fetched, lane);
  add_fetched(a.prefetch, fetched, lane);
}
