// The lightning indexer's scores of fp8 keys for many rows of a request; contract in
// kernels/reference/index_scores.py, bits of index_scores.cu.
//
// One block an SM takes an equal share of the units of tiles.cuh: up to eight queries against 128
// keys. One warp sends for queries and for pages, by bulk copies into rings in shared memory. Three
// warpgroups take the units in turn: both pages' keys to registers, which frees the stage, then for
// one query after the other a product of each page by wgmma; while the second page's product is
// made, the first page's is summed up over its heads.
//
// With prefetch (prefill_prefetch.cuh) rows are scored in waves, every block taking a share of each.
// The scoring warps also count their scores' bins; one warp adds them up over the grid, and two
// fetch what a finished wave wants.
#include "hopper.cuh"
#include "keys.cuh"
#include "prefill_prefetch.cuh"

constexpr u32 THREADS = 512;
constexpr u32 GROUPS = 3;  // warpgroups that multiply; the fourth's warps do all else
constexpr u32 GROUP_WARPS = 4;
constexpr u32 SCORING_WARPS = GROUPS * GROUP_WARPS;
constexpr u32 FETCHING_WARPS = 2;
constexpr u32 STAGES = 4;  // units in flight
constexpr u32 QUERY_STAGES = 2;
// Registers of a thread in a warpgroup that multiplies, and in the other.
DEVICE constexpr u32 scoring_registers(bool prefetch) { return prefetch ? 136 : 160; }
DEVICE constexpr u32 other_registers(bool prefetch) { return prefetch ? 104 : 32; }

// What a stage holds.
struct alignas(16) Note {
  u32 row, rows;  // of the segment; 0 rows: nothing will follow
  u32 first;      // position of its first key
  u32 rest;       // sequence of the work, and whether the group has no other unit of it
};

struct Shared {
  alignas(128) u8 pages[STAGES][2][PAGE_BYTES];
  alignas(128) u8 queries[QUERY_STAGES][TILE_ROWS * image_bytes(MAX_HEADS)];
  Note notes[STAGES];
  u32 tokens[QUERY_STAGES][TILE_ROWS];
  Barrier page_full[STAGES], page_empty[STAGES];
  Barrier query_full[QUERY_STAGES], query_empty[QUERY_STAGES];
  // From here on only with prefetch.
  Barrier flushed[QUERY_STAGES];
  u32 bins[QUERY_STAGES][TILE_ROWS][SCORE_BINS];
  WaveNotes waves[FETCHING_WARPS];
  float shifts[QUERY_STAGES];
  u32 done;  // scoring warps that have no more to do
  u32 pad;
};

// What prefill_scores.py asks for.
constexpr u32 FOR_PREFETCH = sizeof(Barrier) * QUERY_STAGES +
                             sizeof(u32) * QUERY_STAGES * TILE_ROWS * SCORE_BINS +
                             sizeof(WaveNotes) * FETCHING_WARPS + sizeof(u32) * (QUERY_STAGES + 2);
static_assert(sizeof(Shared) == 220416, "PREFETCHING_SHARED_BYTES");
static_assert(sizeof(Shared) - FOR_PREFETCH == 202976, "SHARED_BYTES");

struct PrefillArguments {
  const u8* images;         // [rows, image_bytes]
  const u8* pages;          // [n_pages, PAGE_BYTES]
  const i32* block_tables;  // [requests, blocks]
  Rows rows;
  float* out;  // [rows, width]
  u32 blocks;
};

struct PrefetchingArguments {
  PrefillArguments scores;
  InterArguments prefetch;
};

// Send for a segment's queries, and say how far each may see.
template <u32 HEADS, bool PREFETCH>
DEVICE void bring_queries(const PrefillArguments& a, const InterArguments* prefetch,
                          Shared* shared, const Work& work, u32 row, u32 lane) {
  const u32 stage = work.sequence % QUERY_STAGES, rows = work.segment.rows;
  Barrier *full = &shared->query_full[stage], *empty = &shared->query_empty[stage];
  barrier_wait(PREFETCH ? &shared->flushed[stage] : empty, work.sequence / QUERY_STAGES % 2 ^ 1);
  const u32 tokens = lane < rows ? tokens_of(a.rows.contexts, row + lane) : 0;
#pragma unroll
  for (u32 i = 0; i < TILE_ROWS; i++) {
    // By the lane that announces them.
    const u32 of_row = __shfl_sync(ALL_LANES, tokens, i);
    if (lane == 0) shared->tokens[stage][i] = of_row;
  }
  if (lane != 0) return;
  if (PREFETCH) shared->shifts[stage] = prefetch->shifts[a.rows.requests[row]];
  // For groups that get no unit of this work.
  for (u32 idle = smaller(work.units, GROUPS) * GROUP_WARPS; idle < SCORING_WARPS; idle++)
    barrier_arrive(empty);
  barrier_arrive_expecting(full, rows * image_bytes(HEADS));
  copy_to_shared(shared->queries[stage], a.images + u64(row) * image_bytes(HEADS),
                 rows * image_bytes(HEADS), full);
}

// Send for the pages of a segment's units. Returns how many units were sent for before and now.
DEVICE u32 bring_pages(const PrefillArguments& a, Shared* shared, const Work& work, u32 row,
                       u32 count, u32 lane) {
  const u32 pages = ceil_div(work.segment.tokens, PAGE_TOKENS);
  const i32* table = a.block_tables + u64(u32(a.rows.requests[row])) * a.blocks;
  const u32 end = smaller(2 * (work.unit + work.units), pages);
  u32 page = 2 * work.unit;
  i32 ids = page + lane < end ? table[page + lane] : 0;
  for (u32 start = page; start < end; start += WARP) {
    const i32 ids_ahead = start + WARP + lane < end ? table[start + WARP + lane] : 0;
    for (; page < end && page < start + WARP; page += 2, count++) {
      const i32 id = __shfl_sync(ALL_LANES, ids, page - start);
      const i32 next = __shfl_sync(ALL_LANES, ids, page + 1 - start);
      if (lane != 0) continue;
      const u32 stage = count % STAGES;
      Barrier* full = &shared->page_full[stage];
      barrier_wait(&shared->page_empty[stage], count / STAGES % 2 ^ 1);
      const bool last = page + 2 * GROUPS >= end, both = page + 1 < end;
      shared->notes[stage] = {row, work.segment.rows, page * PAGE_TOKENS,
                              work.sequence << 1 | last};
      barrier_arrive_expecting(full, both ? 2 * PAGE_BYTES : PAGE_BYTES);
      u8(*to)[PAGE_BYTES] = shared->pages[stage];
      copy_to_shared(to[0], a.pages + u64(u32(id)) * PAGE_BYTES, PAGE_BYTES, full);
      if (both) copy_to_shared(to[1], a.pages + u64(u32(next)) * PAGE_BYTES, PAGE_BYTES, full);
    }
    ids = ids_ahead;
  }
  return count;
}

// Send for everything, in the order in which the groups take it. One warp.
template <u32 HEADS, bool PREFETCH>
DEVICE void bring(const PrefillArguments& a, const InterArguments* prefetch, Shared* shared,
                  u32 lane) {
  u32 count = 0;
  for_works<PREFETCH>(a.rows, block_index(), grid_size(), lane, [&](const Work& work, u32 first) {
    wait_for_previous_kernel();
    const u32 row = first + work.segment.row;
    bring_queries<HEADS, PREFETCH>(a, prefetch, shared, work, row, lane);
    count = bring_pages(a, shared, work, row, count, lane);
  });
  for (u32 end = count + GROUPS; count < end; count++) {
    if (lane == 0) {
      const u32 stage = count % STAGES;
      barrier_wait(&shared->page_empty[stage], count / STAGES % 2 ^ 1);
      shared->notes[stage] = {0, 0, 0, 0};
      barrier_arrive(&shared->page_full[stage]);
    }
    __syncwarp();
  }
}

// Add up over the grid what was counted. One warp.
DEVICE void flush_bins(const InterArguments& a, Shared* shared, u32 lane) {
  for_works<true>(a.rows, block_index(), grid_size(), lane, [&](const Work& work, u32 first) {
    const u32 stage = work.sequence % QUERY_STAGES;
    barrier_wait(&shared->query_empty[stage], work.sequence / QUERY_STAGES % 2);
    publish(a, work, first, &shared->bins[stage][0][0], lane, [&] {
      if (lane == 0) barrier_arrive(&shared->flushed[stage]);
    });
  });
}

// What no unit covers: -inf. Warps of every block.
DEVICE void fill_rest(const PrefillArguments& a, u32 warp, u32 warps, u32 lane) {
  const u32 width = a.rows.contexts.width;
  for (u32 row = warp; row < a.rows.contexts.rows; row += warps) {
    float* out = a.out + u64(row) * width;
    for (u32 at = covered_tokens(a.rows, row, lane) + lane * 4; at < width; at += WARP * 4)
      store_words(out + at, {MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY});
  }
}

DEVICE void begin(float (&dots)[32], const u32 (&keys)[16], u64 query) {
  begin_64(dots, keys, query);
}
DEVICE void begin(float (&dots)[16], const u32 (&keys)[16], u64 query) {
  begin_32(dots, keys, query);
}

// Sums over this thread's heads, of two keys.
struct Sums {
  float key, key_8;
};
template <u32 HEADS>
DEVICE Sums sum_heads(const float (&dots)[HEADS / 2], const float (&weights)[HEADS / 4]) {
  Sums sums = {0, 0};
#pragma unroll
  for (u32 i = 0; i < HEADS / 8; i++) {
#pragma unroll
    for (u32 j = 0; j < 2; j++) {
      sums.key = fmaf(fmaxf(dots[4 * i + j], 0), weights[2 * i + j], sums.key);
      sums.key_8 = fmaf(fmaxf(dots[4 * i + 2 + j], 0), weights[2 * i + j], sums.key_8);
    }
  }
  return sums;
}

// Sums over the four lanes that share keys, of four keys: each lane gets that of one. Pairs are
// added as index_scores.cu does.
DEVICE float sum_of_quad(const Sums& left, const Sums& right, u32 lane) {
  const bool odd = lane & 1, upper = lane & 2;
  float of_left = odd ? left.key_8 : left.key, of_right = odd ? right.key_8 : right.key;
  of_left += __shfl_xor_sync(ALL_LANES, odd ? left.key : left.key_8, 1);
  of_right += __shfl_xor_sync(ALL_LANES, odd ? right.key : right.key_8, 1);
  const float mine = upper ? of_right : of_left;
  return mine + __shfl_xor_sync(ALL_LANES, upper ? of_left : of_right, 2);
}

template <u32 HEADS>
DEVICE void load_weights(float (&weights)[HEADS / 4], const u8* image, u32 lane) {
  const float* from = reinterpret_cast<const float*>(image + HEADS * DIM) + lane % 4 * 2;
#pragma unroll
  for (u32 i = 0; i < HEADS / 8; i++) {
    weights[2 * i] = from[8 * i];
    weights[2 * i + 1] = from[8 * i + 1];
  }
}

// A stage's note: read by the lane that will say that the stage is empty.
DEVICE Note read_note(const Note* at, u32 lane) {
  Note note = {0, 0, 0, 0};
  if (lane == 0) note = *at;
  return {__shfl_sync(ALL_LANES, note.row, 0), __shfl_sync(ALL_LANES, note.rows, 0),
          __shfl_sync(ALL_LANES, note.first, 0), __shfl_sync(ALL_LANES, note.rest, 0)};
}

// The units of one warpgroup.
template <u32 HEADS, bool PREFETCH>
DEVICE void score_units(const PrefillArguments& a, Shared* shared, u32 group, u32 thread) {
  constexpr u64 NEXT_QUERY = image_bytes(HEADS) >> 4;  // in a descriptor
  const u32 lane = thread % WARP, width = a.rows.contexts.width;
  const u32 key = thread / WARP % GROUP_WARPS * 16 + lane / 4;  // and key + 8
  const u32 mine = key + (lane & 1) * 8 + (lane & 2) * (PAGE_TOKENS / 2);
  for (u32 count = group;; count += GROUPS) {
    const u32 stage = count % STAGES;
    barrier_wait(&shared->page_full[stage], count / STAGES % 2);
    const Note note = read_note(shared->notes + stage, lane);
    if (note.rows == 0) return;
    u32 left_keys[16], right_keys[16];
    load_keys(left_keys, shared->pages[stage][0], key, lane);
    load_keys(right_keys, shared->pages[stage][1], key, lane);
    const float scale = reinterpret_cast<const float*>(
        shared->pages[stage][lane >> 1 & 1] + PAGE_TOKENS * DIM)[key + (lane & 1) * 8];
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared->page_empty[stage]);

    const u32 sequence = note.rest >> 1, at = sequence % QUERY_STAGES;
    barrier_wait(&shared->query_full[at], sequence / QUERY_STAGES % 2);
    const u8* image = shared->queries[at];
    u64 query = matrix_descriptor(image, 128, 1024);
    const u32 position = note.first + mine;
    const bool exists = position < width;
    float* out = a.out + u64(note.row) * width + position;
    float left[HEADS / 2] = {}, right[HEADS / 2] = {}, weights[HEADS / 4];
    for (u32 row = 0; row < note.rows; row++) {
      begin(left, left_keys, query);
      begin(right, right_keys, query);
      load_weights<HEADS>(weights, image, lane);
      query += NEXT_QUERY, image += image_bytes(HEADS);
      wait_for_products<1>(left, left_keys);
      const Sums of_left = sum_heads<HEADS>(left, weights);
      wait_for_products<0>(right, right_keys);
      const Sums of_right = sum_heads<HEADS>(right, weights);
      const float sum = sum_of_quad(of_left, of_right, lane) * scale;
      const bool inside = position < shared->tokens[at][row];
      if (exists) *out = inside ? sum : bits_float(MINUS_INFINITY);
      if (PREFETCH && inside)
        atomicAdd(&shared->bins[at][row][bin_of(sum, shared->shifts[at])], 1u);
      out += width;
    }
    __syncwarp();
    if (lane == 0 && (note.rest & 1)) barrier_arrive(&shared->query_empty[at]);
  }
}

template <bool PREFETCH>
DEVICE void begin_block(Shared* shared, u32 thread) {
  if (thread < STAGES) {
    barrier_init(&shared->page_full[thread], 1);
    barrier_init(&shared->page_empty[thread], GROUP_WARPS);
  }
  if (thread < QUERY_STAGES) {
    barrier_init(&shared->query_full[thread], 1);
    barrier_init(&shared->query_empty[thread], SCORING_WARPS);
    if (PREFETCH) barrier_init(&shared->flushed[thread], 1);
  }
  barrier_init_done();
  if (PREFETCH) {
    if (thread == 0) shared->done = 0;
    u32* bins = &shared->bins[0][0][0];
    for (u32 at = thread; at < QUERY_STAGES * TILE_ROWS * SCORE_BINS; at += THREADS) bins[at] = 0;
  }
  block_sync();
}

template <u32 HEADS, bool PREFETCH>
DEVICE void prefill_scores(const PrefillArguments& a, const InterArguments* prefetch) {
  Shared* shared = reinterpret_cast<Shared*>(shared_memory());
  const u32 thread = thread_index(), lane = thread % WARP, warp = thread / WARP;
  begin_block<PREFETCH>(shared, thread);
  if (warp < SCORING_WARPS) {
    take_registers<scoring_registers(PREFETCH)>();
    score_units<HEADS, PREFETCH>(a, shared, warp / GROUP_WARPS, thread);
    if (PREFETCH && lane == 0) atomicAdd(&shared->done, 1u);
    return;
  }
  give_registers<other_registers(PREFETCH)>();
  if (warp == SCORING_WARPS) {
    bring<HEADS, PREFETCH>(a, prefetch, shared, lane);
  } else if (PREFETCH && warp == SCORING_WARPS + 1) {
    flush_bins(*prefetch, shared, lane);
  } else {
    constexpr u32 FIRST = SCORING_WARPS + (PREFETCH ? 2 : 1), FILLING = THREADS / WARP - FIRST;
    const u32 mine = block_index() + grid_size() * (warp - FIRST);
    fill_rest(a, mine, grid_size() * FILLING, lane);
    if (PREFETCH) {
      wait_for_previous_kernel();
      fetch_waves(*prefetch, &shared->waves[warp - FIRST], mine, grid_size() * FILLING, lane, [=] {
        const u32 done = lane == 0 ? load_from_block(&shared->done) : 0;
        return __shfl_sync(ALL_LANES, done, 0) == SCORING_WARPS;
      });
    }
  }
}

KERNEL(THREADS, 1) void prefill_scores_64(ARGUMENTS PrefillArguments a) {
  prefill_scores<64, false>(a, nullptr);
}
KERNEL(THREADS, 1) void prefill_scores_32(ARGUMENTS PrefillArguments a) {
  prefill_scores<32, false>(a, nullptr);
}
KERNEL(THREADS, 1) void prefill_prefetching_64(ARGUMENTS PrefetchingArguments a) {
  prefill_scores<64, true>(a.scores, &a.prefetch);
}
KERNEL(THREADS, 1) void prefill_prefetching_32(ARGUMENTS PrefetchingArguments a) {
  prefill_scores<32, true>(a.scores, &a.prefetch);
}

// What the waves want and is still absent, once all are scored.
KERNEL(THREADS, 1) void prefill_fetch_late(ARGUMENTS InterArguments a) {
  const u32 thread = thread_index(), warp = thread / WARP;
  WaveNotes* notes = reinterpret_cast<WaveNotes*>(shared_memory()) + warp;
  fetch_waves(a, notes, warp * grid_size() + block_index(), THREADS / WARP * grid_size(),
              thread % WARP, [] { return false; });
}
