// The lightning indexer's scores of fp8 keys; contract in kernels/reference/index_scores.py.
//
// `quantise_query` makes of every row's query the image that `index_scores` multiplies by. Then one
// block an SM takes an equal share of all pages. One warp sends for pages, each a single bulk copy
// of 8,448 bytes into a ring in shared memory; another sends for the queries of the rows that the
// pages belong to; four warpgroups take the pages in turn, a page at a time: keys to registers,
// which frees the stage, wgmma against the query, then relu, weights and the sum over heads.
#include "hopper.cuh"
#include "keys.cuh"
#include "prefetch.cuh"
#include "schedule.cuh"

constexpr u32 THREADS = 640;
constexpr u32 GROUPS = 4;  // warpgroups that multiply; the fifth's warps bring data
constexpr u32 GROUP_WARPS = 4;
constexpr u32 SCORING_WARPS = GROUPS * GROUP_WARPS;
// Pages in flight, a multiple of GROUPS: 67 KB an SM. Measured: half as many starve the groups, twice
// as many make every page wait behind more of the others and cost a microsecond or two a launch.
constexpr u32 STAGES = 8;
// A row's query may be sent for while the groups are at the five runs before it: more than there
// are groups, or short rows would wait for each other in a circle.
constexpr u32 QUERY_STAGES = 5;

// Which page a stage holds.
struct alignas(16) PageNote {
  u32 row;
  u32 first;     // position of its first key
  u32 id;        // of the page
  u32 rest;      // sequence of the run, which says where the query is, and tokens of the page
};
constexpr u32 SEQUENCE_SHIFT = 8;

struct ScoresShared {
  alignas(128) u8 pages[STAGES][PAGE_BYTES];
  alignas(128) u8 queries[QUERY_STAGES][image_bytes(MAX_HEADS)];
  PageNote notes[STAGES];
  Barrier page_full[STAGES], page_empty[STAGES];
  Barrier query_full[QUERY_STAGES], query_empty[QUERY_STAGES];
  // From here on only with prefetch.
  float thresholds[QUERY_STAGES];  // of the queries' rows
  u32 listed[SCORING_WARPS];       // by each of them
  u32 epoch;
};

// What index_scores.py asks for.
constexpr u32 FOR_PREFETCH = 176;
static_assert(sizeof(ScoresShared) == 110336, "PREFETCHING_SHARED_BYTES");
static_assert(sizeof(ScoresShared) - FOR_PREFETCH == 110160, "SHARED_BYTES");

struct QueryArguments {
  const void* query;     // [rows, heads, 128]
  const float* weights;  // [rows, heads]
  u8* images;            // [rows, image_bytes] out
  float factor;          // on the weights
  u32 rows;
  u32 heads;
  u32 is_bfloat16;
  u32 most;         // candidates of a row; 0 without prefetch
  i32* counts;      // [rows] out: 0
  i32* host_slots;  // [rows, most] out: -1
  float* scores;    // [rows, most] out: -inf
  u32* kth;         // [rows] out: UNKNOWN
  u32* epoch;       // [1], raised
  u32* gate;        // [1] out: open
};

struct ScoresArguments {
  const u8* images;         // [rows, image_bytes]
  const u8* pages;          // [n_pages, PAGE_BYTES]
  const i32* block_tables;  // [requests, blocks]
  const i32* request_rows;  // [rows]
  Contexts contexts;
  float* out;  // [rows, width]
  u32 blocks;
};

// Where candidates go.
struct ListingArguments {
  const i32* request_slots;  // [rows], entries of thresholds; -1: none
  const float* thresholds;   // [slots], predicted k-th scores
  Listed* lists;             // [blocks, SCORING_WARPS, LIST]
  const u32* epoch;          // [1]
  u32 readers;               // threads that read a list
  u32 pad;
};

struct PrefetchingArguments {
  ScoresArguments scores;
  ListingArguments listing;
};

DEVICE float round_to_bfloat16(float x) {  // finite x
  const u32 bits = float_bits(x);
  return bits_float((bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u);
}

DEVICE u32 to_e4m3(float a, float b, float c, float d) {
  unsigned short low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return u32(high) << 16 | low;
}

// What a prefetch finds before its first candidate.
DEVICE void clear_candidates(const QueryArguments& a, u32 index, u32 threads) {
  if (index == 0) {
    *a.epoch += 1;
    *a.gate = 0;
  }
  for (u32 row = index; row < a.rows; row += threads) {
    a.counts[row] = 0;
    a.kth[row] = UNKNOWN;
  }
  for (u64 at = index; at < u64(a.rows) * a.most; at += threads) {
    a.host_slots[at] = NONE;
    a.scores[at] = bits_float(MINUS_INFINITY);
  }
}

// Rotate and quantise one head of one row a warp, to the same bytes as the reference.
KERNEL(THREADS, 1) void quantise_query(ARGUMENTS QueryArguments a) {
  let_next_kernel_start();
  const u32 thread = thread_index(), lane = thread % WARP;
  const u32 index = block_index() * (THREADS / WARP) + thread / WARP;
  if (a.most != 0) clear_candidates(a, block_index() * THREADS + thread, grid_size() * THREADS);
  if (index >= a.rows * a.heads) return;
  float x[4];
  if (a.is_bfloat16) {
    const u32* from = static_cast<const u32*>(a.query) + (u64(index) * DIM + lane * 4) / 2;
    const u32 low = from[0], high = from[1];
    x[0] = bits_float(low << 16), x[1] = bits_float(low & 0xffff0000u);
    x[2] = bits_float(high << 16), x[3] = bits_float(high & 0xffff0000u);
  } else {
    const float* from = static_cast<const float*>(a.query) + u64(index) * DIM + lane * 4;
#pragma unroll
    for (u32 i = 0; i < 4; i++) x[i] = from[i];
  }
#pragma unroll
  for (u32 step = 1; step < 4; step *= 2) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      if (i & step) continue;
      const float left = x[i], right = x[i + step];
      x[i] = left + right;
      x[i + step] = left - right;
    }
  }
#pragma unroll
  for (u32 step = 1; step < WARP; step *= 2) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const float other = __shfl_xor_sync(ALL_LANES, x[i], step);
      x[i] = lane & step ? other - x[i] : x[i] + other;
    }
  }
  u32 largest = float_bits(1e-4f);
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    x[i] *= 0.08838834764831845f;  // 128 ** -0.5
    if (a.is_bfloat16) x[i] = round_to_bfloat16(x[i]);
    const u32 size = float_bits(x[i]) & 0x7fffffffu;
    largest = size > largest ? size : largest;
  }
  largest = __reduce_max_sync(ALL_LANES, largest);
  // The least power of two that is no smaller than largest / 448.
  const u32 bits = float_bits(bits_float(largest) * (1.0f / 448.0f));
  const u32 exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0);
  const float scale = bits_float(exponent << 23), inverse = bits_float((254 - exponent) << 23);
  const u32 row = index / a.heads, head = index % a.heads;
  u8* image = a.images + u64(row) * image_bytes(a.heads);
  // A thread of `score_page` has sixteen consecutive bytes of a key in each half; its words 0 and 1
  // go into the first product, 2 and 3 into the second.
  const u32 chunk = lane / 16 * 4 + lane % 4, within = lane % 16 / 4 * 4;
  *reinterpret_cast<u32*>(image + (head / 8 * 8 + chunk) * 128 + head % 8 * 16 + within) =
      to_e4m3(x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse);
  if (lane == 0)
    reinterpret_cast<float*>(image + a.heads * DIM)[head] = a.weights[index] * a.factor * scale;
}

// Send for pages in the order in which the groups take them. One warp.
DEVICE void bring_pages(const ScoresArguments& a, ScoresShared* shared, const Share& share,
                        i32 first_requests, u32 lane) {
  u32 count = 0;
  for (Run run = first_run(a.contexts, share); run.pages != 0; next_run(a.contexts, &run)) {
    const i32 request = run.row < WARP ? __shfl_sync(ALL_LANES, first_requests, run.row)
                                       : a.request_rows[run.row];
    const i32* table = a.block_tables + u64(u32(request)) * a.blocks + run.page;
    i32 ids = lane < run.pages ? table[lane] : 0;
    for (u32 start = 0; start < run.pages; start += WARP) {
      const u32 later = start + WARP + lane;
      const i32 ids_ahead = later < run.pages ? table[later] : 0;
      const u32 some = smaller(WARP, run.pages - start);
      for (u32 i = 0; i < some; i++, count++) {
        const i32 id = __shfl_sync(ALL_LANES, ids, i);
        if (lane != 0) continue;
        const u32 stage = count % STAGES;
        barrier_wait(&shared->page_empty[stage], count / STAGES % 2 ^ 1);
        const u32 first = (run.page + start + i) * PAGE_TOKENS;
        shared->notes[stage] = {run.row, first, u32(id),
                                run.sequence << SEQUENCE_SHIFT |
                                    smaller(run.tokens - first, PAGE_TOKENS)};
        barrier_arrive_expecting(&shared->page_full[stage], PAGE_BYTES);
        copy_to_shared_once(shared->pages[stage], a.pages + u64(u32(id)) * PAGE_BYTES, PAGE_BYTES,
                       &shared->page_full[stage]);
      }
      ids = ids_ahead;
    }
  }
}

// Send for the query of each run, and look up its threshold. One thread.
template <u32 HEADS>
DEVICE void bring_queries(const ScoresArguments& a, const ListingArguments* listing,
                          ScoresShared* shared, const Share& share) {
  Run run = first_run(a.contexts, share);
  // The first threshold is older than the kernel that is waited for.
  float threshold = 0;
  if (listing != nullptr && run.pages != 0)
    threshold = threshold_of(listing->request_slots, listing->thresholds, run.row);
  wait_for_previous_kernel();
  if (listing != nullptr) shared->epoch = *listing->epoch;
  while (run.pages != 0) {
    const u32 stage = run.sequence % QUERY_STAGES;
    Barrier* full = &shared->query_full[stage];
    barrier_wait(&shared->query_empty[stage], run.sequence / QUERY_STAGES % 2 ^ 1);
    barrier_expect(full, image_bytes(HEADS));
    copy_to_shared(shared->queries[stage], a.images + u64(run.row) * image_bytes(HEADS),
                   image_bytes(HEADS), full);
    if (listing != nullptr) shared->thresholds[stage] = threshold;
    barrier_arrive(full);
    next_run(a.contexts, &run);
    if (listing != nullptr && run.pages != 0)
      threshold = threshold_of(listing->request_slots, listing->thresholds, run.row);
  }
}

// What no page covers: -inf from each row's last page to the row's end. Warps of every block.
DEVICE void fill_rest(const ScoresArguments& a, u32 warp, u32 warps, u32 lane) {
  const u32 pages = a.contexts.width / PAGE_TOKENS;
  for (u32 row = 0; row < a.contexts.rows; row++) {
    const u32 covered = ceil_div(tokens_of(a.contexts, row), PAGE_TOKENS);
    float* out = a.out + u64(row) * a.contexts.width;
    // Two pages a warp: sixteen bytes a lane.
    for (u32 page = covered + 2 * warp; page < pages; page += 2 * warps)
      if (page + lane / 16 < pages)
        store_words(out + page * PAGE_TOKENS + lane * 4, 
                    {MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY});
  }
}

// The query that a group works with.
template <u32 HEADS>
struct Query {
  u32 sequence;
  u64 first;  // of its four parts, of 32 bytes a head each
  float weights[HEADS / 4];  // of this thread's heads: 8 i + 2 (lane % 4) + {0, 1}
};

template <u32 HEADS>
DEVICE void load_query(ScoresShared* shared, Query<HEADS>* query, u32 lane) {
  const u32 stage = query->sequence % QUERY_STAGES;
  barrier_wait(&shared->query_full[stage], query->sequence / QUERY_STAGES % 2);
  const u8* image = shared->queries[stage];
  query->first = matrix_descriptor(image, 128, 1024);
  const float* weights = reinterpret_cast<const float*>(image + HEADS * DIM) + lane % 4 * 2;
#pragma unroll
  for (u32 i = 0; i < HEADS / 8; i++) {
    query->weights[2 * i] = weights[8 * i];
    query->weights[2 * i + 1] = weights[8 * i + 1];
  }
}

template <u32 HEADS>
DEVICE void use_query(ScoresShared* shared, Query<HEADS>* query, u32 sequence, u32 lane) {
  for (; query->sequence != sequence; query->sequence++)
    if (lane == 0) barrier_arrive(&shared->query_empty[query->sequence % QUERY_STAGES]);
  load_query<HEADS>(shared, query, lane);
}

DEVICE void multiply(float (&dots)[32], const u32 (&keys)[16], const u64 (&query)[4]) {
  multiply_64(dots, keys, query);
}
DEVICE void multiply(float (&dots)[16], const u32 (&keys)[16], const u64 (&query)[4]) {
  multiply_32(dots, keys, query);
}

// Sum over the four lanes that share a key.
DEVICE float sum_of_quad(float value) {
  value += __shfl_xor_sync(ALL_LANES, value, 1);
  return value + __shfl_xor_sync(ALL_LANES, value, 2);
}

DEVICE Listed* list_of_warp(const ListingArguments& a, u32 thread) {
  return a.lists + u64(block_index() * SCORING_WARPS + thread / WARP) * LIST;
}

// The epoch, by a warp that may have had no query and so hasn't waited for the kernel before.
DEVICE u32 epoch_of(const ListingArguments& a) {
  wait_for_previous_kernel();
  return *a.epoch;
}

// The pages of one warpgroup.
template <u32 HEADS, bool PREFETCH>
DEVICE void score_pages(const ScoresArguments& a, const ListingArguments* listing,
                        ScoresShared* shared, u32 pages, u32 group, u32 thread) {
  const u32 lane = thread % WARP;
  const u32 key = thread / WARP % GROUP_WARPS * 16 + lane / 4;  // and key + 8
  Query<HEADS> query = {};
  if (group < pages) load_query<HEADS>(shared, &query, lane);
  for (u32 count = group; count < pages; count += GROUPS) {
    const u32 stage = count % STAGES;
    barrier_wait(&shared->page_full[stage], count / STAGES % 2);
    const PageNote note = shared->notes[stage];
    const u8* page = shared->pages[stage];
    u32 keys[16];
    load_keys(keys, page, key, lane);
    const float* scales = reinterpret_cast<const float*>(page + PAGE_TOKENS * DIM);
    const float scale = scales[key], scale_8 = scales[key + 8];
    const u32 sequence = note.rest >> SEQUENCE_SHIFT;
    const u32 tokens = note.rest & ((1u << SEQUENCE_SHIFT) - 1);
    if (sequence != query.sequence)
      use_query<HEADS>(shared, &query, sequence, lane);
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared->page_empty[stage]);

    float dots[HEADS / 2];
    const u64 parts[4] = {query.first, query.first + 16, query.first + 32, query.first + 48};
    multiply(dots, keys, parts);
    float sum = 0, sum_8 = 0;
#pragma unroll
    for (u32 i = 0; i < HEADS / 8; i++) {
#pragma unroll
      for (u32 j = 0; j < 2; j++) {
        sum = fmaf(fmaxf(dots[4 * i + j], 0), query.weights[2 * i + j], sum);
        sum_8 = fmaf(fmaxf(dots[4 * i + 2 + j], 0), query.weights[2 * i + j], sum_8);
      }
    }
    sum = sum_of_quad(sum) * scale;
    sum_8 = sum_of_quad(sum_8) * scale_8;
    const u32 mine = key + (lane & 1) * 8;
    const float score = mine < tokens ? (lane & 1 ? sum_8 : sum) : bits_float(MINUS_INFINITY);
    const bool writes = lane % 4 < 2;
    if (writes) a.out[u64(note.row) * a.contexts.width + note.first + mine] = score;
    if (PREFETCH) {
      const float threshold = shared->thresholds[query.sequence % QUERY_STAGES];
      list_candidates(list_of_warp(*listing, thread), shared->listed + thread / WARP,
                      writes && mine < tokens && score >= threshold,
                      i32(note.id * PAGE_TOKENS + mine), score, note.row, shared->epoch, lane);
    }
  }
  if (PREFETCH)
    end_list(list_of_warp(*listing, thread), shared->listed[thread / WARP], listing->readers,
             epoch_of(*listing), lane);
}

template <u32 HEADS, bool PREFETCH>
DEVICE void index_scores(const ScoresArguments& a, const ListingArguments* listing) {
  ScoresShared* shared = reinterpret_cast<ScoresShared*>(shared_memory());
  const u32 thread = thread_index(), lane = thread % WARP, warp = thread / WARP;
  if (thread < STAGES) {
    barrier_init(&shared->page_full[thread], 1);
    barrier_init(&shared->page_empty[thread], GROUP_WARPS);
  }
  if (thread < QUERY_STAGES) {
    barrier_init(&shared->query_full[thread], 1);
    barrier_init(&shared->query_empty[thread], SCORING_WARPS);
  }
  if (PREFETCH && thread < SCORING_WARPS) shared->listed[thread] = 0;
  barrier_init_done();
  // Sent for now, before the share is known.
  const i32 first_requests = lane < a.contexts.rows ? a.request_rows[lane] : 0;
  const Share share = share_of(a.contexts, block_index(), grid_size(), lane);
  block_sync();
  if (warp < SCORING_WARPS) {
    score_pages<HEADS, PREFETCH>(a, listing, shared, share.pages, warp / GROUP_WARPS, thread);
    return;
  }
  switch (warp - SCORING_WARPS) {
    case 0:
      bring_pages(a, shared, share, first_requests, lane);
      break;
    case 1:
      if (lane == 0) bring_queries<HEADS>(a, listing, shared, share);
      break;
    default:
      fill_rest(a, 2 * block_index() + warp % 2, 2 * grid_size(), lane);
  }
}

KERNEL(THREADS, 1) void index_scores_64(ARGUMENTS ScoresArguments a) {
  index_scores<64, false>(a, nullptr);
}
KERNEL(THREADS, 1) void index_scores_32(ARGUMENTS ScoresArguments a) {
  index_scores<32, false>(a, nullptr);
}
KERNEL(THREADS, 1) void prefetching_64(ARGUMENTS PrefetchingArguments a) {
  index_scores<64, true>(a.scores, &a.listing);
}
KERNEL(THREADS, 1) void prefetching_32(ARGUMENTS PrefetchingArguments a) {
  index_scores<32, true>(a.scores, &a.listing);
}
