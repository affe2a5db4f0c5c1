// The lightning indexer's scores of fp8 keys for many rows of a request; contract in
// kernels/reference/index_scores.py, bits of index_scores.cu.
//
// One block an SM takes an equal share of the units of tiles.cuh: up to eight queries against 128
// keys. One warp sends for queries and for pages, by bulk copies into rings in shared memory. Three
// warpgroups take the units in turn: both pages' keys to registers, which frees the stage, then for
// one query after the other a product of each page by wgmma; while one page's product is made, the
// other page's last one is summed up over its heads.
#include "hopper.cuh"
#include "tiles.cuh"

constexpr u32 THREADS = 512;
constexpr u32 GROUPS = 3;  // warpgroups that multiply; the fourth's warps bring data
constexpr u32 GROUP_WARPS = 4;
constexpr u32 SCORING_WARPS = GROUPS * GROUP_WARPS;
constexpr u32 DIM = 128;  // bytes of a key
constexpr u32 PAGE_BYTES = PAGE_TOKENS * (DIM + 4);
constexpr u32 STAGES = 5;  // units in flight
constexpr u32 QUERY_STAGES = 2;
constexpr u32 MAX_HEADS = 64;
constexpr u32 MINUS_INFINITY = 0xff800000u;
constexpr u32 MATH_REGISTERS = 160, OTHER_REGISTERS = 32;

// A query as quantise_query leaves it: its bytes, then the weight of each head.
DEVICE constexpr u32 image_bytes(u32 heads) { return heads * (DIM + 4); }

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
};
static_assert(sizeof(Shared) == 219904, "SHARED_BYTES of prefill_scores.py");

struct PrefillArguments {
  const u8* images;         // [rows, image_bytes]
  const u8* pages;          // [n_pages, PAGE_BYTES]
  const i32* block_tables;  // [requests, blocks]
  Rows rows;
  float* out;  // [rows, width]
  u32 blocks;
};

// Send for a segment's queries, and say how far each may see.
template <u32 HEADS>
DEVICE void bring_queries(const PrefillArguments& a, Shared* shared, const Work& work, u32 lane) {
  const u32 stage = work.sequence % QUERY_STAGES, rows = work.segment.rows;
  Barrier *full = &shared->query_full[stage], *empty = &shared->query_empty[stage];
  barrier_wait(empty, work.sequence / QUERY_STAGES % 2 ^ 1);
  if (lane < rows)
    shared->tokens[stage][lane] = tokens_of(a.rows.contexts, work.segment.row + lane);
  __syncwarp();
  if (lane != 0) return;
  // For groups that get no unit of this work.
  for (u32 idle = smaller(work.units, GROUPS) * GROUP_WARPS; idle < SCORING_WARPS; idle++)
    barrier_arrive(empty);
  barrier_arrive_expecting(full, rows * image_bytes(HEADS));
  copy_to_shared(shared->queries[stage], a.images + u64(work.segment.row) * image_bytes(HEADS),
                 rows * image_bytes(HEADS), full);
}

// Send for everything, in the order in which the groups take it. One warp.
template <u32 HEADS>
DEVICE void bring(const PrefillArguments& a, Shared* shared, u32 lane) {
  u32 count = 0;
  Work work = first_work(a.rows, block_index(), grid_size(), lane);
  wait_for_previous_kernel();
  for (; work.units != 0; next_work(a.rows, &work)) {
    bring_queries<HEADS>(a, shared, work, lane);
    const u32 pages = ceil_div(work.segment.tokens, PAGE_TOKENS);
    const i32* table = a.block_tables + u64(u32(a.rows.requests[work.segment.row])) * a.blocks;
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
        shared->notes[stage] = {work.segment.row, work.segment.rows, page * PAGE_TOKENS,
                                work.sequence << 1 | last};
        barrier_arrive_expecting(full, both ? 2 * PAGE_BYTES : PAGE_BYTES);
        copy_to_shared(shared->pages[stage][0], a.pages + u64(u32(id)) * PAGE_BYTES, PAGE_BYTES, full);
        if (both)
          copy_to_shared(shared->pages[stage][1], a.pages + u64(u32(next)) * PAGE_BYTES, PAGE_BYTES,
                         full);
      }
      ids = ids_ahead;
    }
  }
  if (lane != 0) return;
  for (u32 end = count + GROUPS; count < end; count++) {
    const u32 stage = count % STAGES;
    barrier_wait(&shared->page_empty[stage], count / STAGES % 2 ^ 1);
    shared->notes[stage] = {0, 0, 0, 0};
    barrier_arrive(&shared->page_full[stage]);
  }
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

// This thread's part of two keys of a page; see index_scores.cu.
DEVICE void load_keys(u32 (&keys)[16], const u8* page, u32 key, u32 lane) {
  const u32 odd = key % 2, column = lane % 4 * 16;
#pragma unroll
  for (u32 i = 0; i < 2; i++) {  // rows key and key + 8
    const u8* row = page + (key + 8 * i) * DIM + column;
    const Words one = load_words(row + odd * 64), other = load_words(row + (odd ^ 1) * 64);
    const Words left = odd ? other : one, right = odd ? one : other;
    keys[i] = left.x, keys[2 + i] = left.y, keys[4 + i] = left.z, keys[6 + i] = left.w;
    keys[8 + i] = right.x, keys[10 + i] = right.y, keys[12 + i] = right.z, keys[14 + i] = right.w;
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

// The units of one warpgroup.
template <u32 HEADS>
DEVICE void score_units(const PrefillArguments& a, Shared* shared, u32 group, u32 thread) {
  constexpr u64 NEXT_QUERY = image_bytes(HEADS) >> 4;  // in a descriptor
  const u32 lane = thread % WARP, width = a.rows.contexts.width;
  const u32 key = thread / WARP % GROUP_WARPS * 16 + lane / 4;  // and key + 8
  const u32 mine = key + (lane & 1) * 8 + (lane & 2) * (PAGE_TOKENS / 2);
  for (u32 count = group;; count += GROUPS) {
    const u32 stage = count % STAGES;
    barrier_wait(&shared->page_full[stage], count / STAGES % 2);
    const Note note = shared->notes[stage];
    const u32 rows = __shfl_sync(ALL_LANES, note.rows, 0);
    if (rows == 0) return;
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
    for (u32 row = 0; row < rows; row++) {
      begin(left, left_keys, query);
      begin(right, right_keys, query);
      load_weights<HEADS>(weights, image, lane);
      query += NEXT_QUERY, image += image_bytes(HEADS);
      wait_for_products<1>(left, left_keys);
      const Sums of_left = sum_heads<HEADS>(left, weights);
      wait_for_products<0>(right, right_keys);
      const Sums of_right = sum_heads<HEADS>(right, weights);
      const float sum = sum_of_quad(of_left, of_right, lane) * scale;
      if (exists) *out = position < shared->tokens[at][row] ? sum : bits_float(MINUS_INFINITY);
      out += width;
    }
    __syncwarp();
    if (lane == 0 && (note.rest & 1)) barrier_arrive(&shared->query_empty[at]);
  }
}

template <u32 HEADS>
DEVICE void prefill_scores(const PrefillArguments& a) {
  Shared* shared = reinterpret_cast<Shared*>(shared_memory());
  const u32 thread = thread_index(), lane = thread % WARP, warp = thread / WARP;
  if (thread < STAGES) {
    barrier_init(&shared->page_full[thread], 1);
    barrier_init(&shared->page_empty[thread], GROUP_WARPS);
  }
  if (thread < QUERY_STAGES) {
    barrier_init(&shared->query_full[thread], 1);
    barrier_init(&shared->query_empty[thread], SCORING_WARPS);
  }
  barrier_init_done();
  block_sync();
  if (warp < SCORING_WARPS) {
    take_registers<MATH_REGISTERS>();
    score_units<HEADS>(a, shared, warp / GROUP_WARPS, thread);
    return;
  }
  give_registers<OTHER_REGISTERS>();
  if (warp == SCORING_WARPS)
    bring<HEADS>(a, shared, lane);
  else
    fill_rest(a, block_index() + grid_size() * (warp - SCORING_WARPS - 1),
              grid_size() * (THREADS / WARP - SCORING_WARPS - 1), lane);
}

KERNEL(THREADS, 1) void prefill_scores_64(ARGUMENTS PrefillArguments a) { prefill_scores<64>(a); }
KERNEL(THREADS, 1) void prefill_scores_32(ARGUMENTS PrefillArguments a) { prefill_scores<32>(a); }
