// Exact top-k of a row by one cluster of thread blocks; contract in kernels/reference/topk.py.
//
// Each warp keeps a run of the row in registers as ordered keys (what doesn't fit lies in shared
// memory, and the rest is read again), and the cluster fixes the k-th key by four digits of 8 bits.
// A digit is counted without conflicts, whatever the scores are: every lane has a column of its
// own. Blocks send their 256 counts to each other, so that one cluster barrier a digit is enough.
// No distribution and no length can overflow anything. Then every block counts what it contributes,
// and writes it in ascending position after the blocks before it; ties on the k-th key go to the
// lower positions.
#include "device.cuh"

#ifndef TOPK_THREADS
#define TOPK_THREADS 512
#endif
constexpr u32 THREADS = TOPK_THREADS;
constexpr u32 WARPS = THREADS / WARP;
constexpr u32 BITS = 8;
constexpr u32 BINS = 1 << BITS;
constexpr u32 PASSES = 4;
constexpr u32 MAX_CLUSTER = 8;
constexpr u32 GROUP = 4 * WARP;  // keys that a warp looks at at once
#ifndef TOPK_HELD
#define TOPK_HELD 6
#endif
constexpr u32 HELD = TOPK_HELD;  // of its groups, how many it holds in registers
static_assert(BINS / WARPS <= WARP, "a lane a bin");

struct TopkShared {
  u32 columns[BINS * WARP];            // a digit's counts, one column a lane
  u32 counts[2][MAX_CLUSTER][BINS];    // of every block, from this pass and the one before
  u32 totals[BINS];                    // their sum
  u32 sums[2 * WARP];                  // a pair for each warp
  u32 contributions[2 * MAX_CLUSTER];  // above and equal to the k-th key, for each block
  u32 keys[4];                         // as many as fit
};

struct TopkArguments {
  const float* scores;      // [rows, width]
  const i32* context_lens;  // [rows]
  i32* positions;           // [rows, k] out
  float* kth;               // [rows] out
  i32 width;
  i32 k;
  i32 chunk;   // scores of a row that a block looks at, a multiple of 4
  i32 cached;  // of those, how many it keeps, a multiple of 4
};

// A block's part of a row, and the groups of it that this warp looks at.
struct Part {
  const float* scores;  // its first
  u32* keys;
  u32 size;
  u32 cached;
  bool aligned;  // to sixteen bytes
  u32 first, last;
};

DEVICE Words read_scores(const Part& part, u32 at) {  // bits; 0xffffffff, a NaN, past the end
  if (part.aligned && at + 4 <= part.size) return load_words(part.scores + at);
  const u32* bits = reinterpret_cast<const u32*>(part.scores);
  Words words = {ALL_LANES, ALL_LANES, ALL_LANES, ALL_LANES};
  if (at < part.size) words.x = bits[at];
  if (at + 1 < part.size) words.y = bits[at + 1];
  if (at + 2 < part.size) words.z = bits[at + 2];
  if (at + 3 < part.size) words.w = bits[at + 3];
  return words;
}

DEVICE Words to_keys(const Part& part, u32 at, Words bits) {  // 0 past the end
  Words keys;
  keys.x = at < part.size ? order_key(bits.x) : 0;
  keys.y = at + 1 < part.size ? order_key(bits.y) : 0;
  keys.z = at + 2 < part.size ? order_key(bits.z) : 0;
  keys.w = at + 3 < part.size ? order_key(bits.w) : 0;
  return keys;
}

DEVICE Words four_keys(const Part& part, u32 at) {
  if (at < part.cached) return load_words(part.keys + at);
  return to_keys(part, at, read_scores(part, at));
}

// Call visit(keys, position) for each of this warp's groups, in order; all lanes take part.
template <typename Visit>
DEVICE void for_each_group(const Part& part, const Words* held, u32 lane, Visit visit) {
#pragma unroll
  for (u32 i = 0; i < HELD; i++)
    if (part.first + i < part.last) visit(held[i], (part.first + i) * GROUP + lane * 4);
  for (u32 group = part.first + HELD; group < part.last; group++) {
    const u32 at = group * GROUP + lane * 4;
    visit(four_keys(part, at), at);
  }
}

DEVICE void load_keys(const Part& part, Words* held, u32 lane) {
  Words bits[HELD];
#pragma unroll
  for (u32 i = 0; i < HELD; i++) {
    bits[i] = {ALL_LANES, ALL_LANES, ALL_LANES, ALL_LANES};
    if (part.first + i < part.last)
      bits[i] = read_scores(part, (part.first + i) * GROUP + lane * 4);
  }
#pragma unroll
  for (u32 i = 0; i < HELD; i++)
    held[i] = to_keys(part, (part.first + i) * GROUP + lane * 4, bits[i]);
  for (u32 group = part.first + HELD; group < part.last; group++) {
    const u32 at = group * GROUP + lane * 4;
    if (at < part.cached) store_words(part.keys + at, to_keys(part, at, read_scores(part, at)));
  }
}

// Sum the columns into this block's 256 counts, send those to every block, and clear the columns.
DEVICE void send_counts(TopkShared* shared, u32 side, u32 rank, u32 blocks, u32 thread) {
  constexpr u32 EACH = BINS / WARPS;  // bins of a warp, at most 32
  const u32 lane = thread % WARP, first = thread / WARP * EACH;
  u32 mine = 0;
#pragma unroll 8
  for (u32 i = 0; i < EACH; i++) {
    u32* column = shared->columns + (first + i) * WARP + lane;
    const u32 count = __reduce_add_sync(ALL_LANES, *column);
    *column = 0;
    if (lane == i) mine = count;
  }
  if (lane >= EACH) return;
  for (u32 other = 0; other < blocks; other++)
    *peer(&shared->counts[side][rank][first + lane], other) = mine;
}

// The digit of the wanted-th key from above; takes what lies above it off `wanted`.
DEVICE u32 find_digit(TopkShared* shared, u32 side, u32 blocks, u32* wanted, u32 thread) {
  for (u32 bin = thread; bin < BINS; bin += THREADS) {
    u32 sum = 0;
    for (u32 other = 0; other < blocks; other++) sum += shared->counts[side][other][bin];
    shared->totals[BINS - 1 - bin] = sum;  // from above
  }
  block_sync();
  // Every warp for itself: eight bins a lane.
  const u32 lane = thread % WARP;
  const Words low = load_words(shared->totals + lane * 8);
  const Words high = load_words(shared->totals + lane * 8 + 4);
  const u32 counts[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  u32 sum = 0, ignored;
#pragma unroll
  for (u32 i = 0; i < 8; i++) sum += counts[i];
  u32 before = lanes_before(sum, lane, &ignored);
  const bool here = before < *wanted && *wanted <= before + sum;
  u32 place = 0, above = before;
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
    before += counts[i];
    if (before < *wanted) place = i + 1, above = before;
  }
  const u32 owner = __ffs(__ballot_sync(ALL_LANES, here)) - 1;
  *wanted -= __shfl_sync(ALL_LANES, above, owner);
  return BINS - 1 - (owner * 8 + __shfl_sync(ALL_LANES, place, owner));
}

DEVICE u32 above_of(Words keys, u32 threshold) {  // one bit a key
  return u32(keys.x > threshold) | u32(keys.y > threshold) << 1 | u32(keys.z > threshold) << 2 |
         u32(keys.w > threshold) << 3;
}
DEVICE u32 equal_to(Words keys, u32 threshold) {
  return u32(keys.x == threshold) | u32(keys.y == threshold) << 1 | u32(keys.z == threshold) << 2 |
         u32(keys.w == threshold) << 3;
}

KERNEL(TOPK_THREADS, 2) void topk(ARGUMENTS TopkArguments arguments) {
  TopkShared* shared = reinterpret_cast<TopkShared*>(shared_memory());
  const u32 thread = thread_index(), lane = thread % WARP, warp = thread / WARP;
  const u32 blocks = cluster_size(), rank = cluster_rank();
  const u32 k = arguments.k, row = block_index() / blocks;
  i32* positions = arguments.positions + u64(row) * k;
  const i32 context = arguments.context_lens[row];
  const u32 length = context < 0 ? 0 : smaller(context, arguments.width);
  if (length < k) {  // everything is chosen; the same in the whole cluster
    for (u32 at = rank * THREADS + thread; at < k; at += blocks * THREADS)
      positions[at] = at < length ? i32(at) : -1;
    if (rank == 0 && thread == 0) arguments.kth[row] = bits_float(0xff800000u);
    return;
  }
  const u32 begin = smaller(rank * arguments.chunk, length);
  const u32 size = smaller(arguments.chunk, length - begin);
  const float* scores = arguments.scores + u64(row) * arguments.width + begin;
  const u32 groups = ceil_div(size, GROUP), each = ceil_div(groups, WARPS);
  Part part = {scores,
               shared->keys,
               size,
               smaller(arguments.cached, ceil_div(size, 4) * 4),
               reinterpret_cast<u64>(scores) % 16 == 0,
               0,
               0};
  part.first = smaller(warp * each, groups);
  part.last = smaller(part.first + each, groups);

  cluster_arrive();  // nothing may be sent to a block that hasn't started
  Words held[HELD];
  load_keys(part, held, lane);
  for (u32 i = thread * 4; i < BINS * WARP; i += THREADS * 4)
    store_words(shared->columns + i, {0, 0, 0, 0});
  cluster_wait();
  block_sync();

  u32 threshold = 0, wanted = k;
#pragma unroll 1
  for (u32 pass = 0; pass < PASSES; pass++) {
    const u32 shift = 32 - BITS * (pass + 1);
    u32* column = shared->columns + lane;
    const auto count = [&](u32 key) {
      // The upper digits, by two shifts: one of 32 bits has no meaning.
      if ((key >> shift >> BITS) == threshold && key != 0)
        atomicAdd(&column[(key >> shift & (BINS - 1)) * WARP], 1u);
    };
    for_each_group(part, held, lane, [&](const Words& keys, u32) {
      count(keys.x);
      count(keys.y);
      count(keys.z);
      count(keys.w);
    });
    block_sync();
    send_counts(shared, pass % 2, rank, blocks, thread);
    cluster_arrive();
    cluster_wait();
    threshold = threshold << BITS | find_digit(shared, pass % 2, blocks, &wanted, thread);
  }

  u32 above = 0, equal = 0;
  for_each_group(part, held, lane, [&](const Words& keys, u32) {
    above += __popc(above_of(keys, threshold));
    equal += __popc(equal_to(keys, threshold));
  });
  above = __reduce_add_sync(ALL_LANES, above);
  equal = __reduce_add_sync(ALL_LANES, equal);
  if (lane == 0) {
    shared->sums[2 * warp] = above;
    shared->sums[2 * warp + 1] = equal;
  }
  block_sync();
  u32 block_above, block_equal;
  const u32 above_before =
      lanes_before(lane < WARPS ? shared->sums[2 * lane] : 0, lane, &block_above);
  const u32 equal_before =
      lanes_before(lane < WARPS ? shared->sums[2 * lane + 1] : 0, lane, &block_equal);
  above = __shfl_sync(ALL_LANES, above_before, warp);
  equal = __shfl_sync(ALL_LANES, equal_before, warp);
  if (thread < blocks) {
    u32* target = peer(shared->contributions, thread);
    target[2 * rank] = block_above;
    target[2 * rank + 1] = block_equal;
  }
  cluster_arrive();
  cluster_wait();
  for (u32 other = 0; other < rank; other++) {
    above += shared->contributions[2 * other];
    equal += shared->contributions[2 * other + 1];
  }

  for_each_group(part, held, lane, [&](const Words& keys, u32 at) {
    const u32 is_above = above_of(keys, threshold), is_equal = equal_to(keys, threshold);
    if (!__any_sync(ALL_LANES, (is_above | is_equal) != 0)) return;
    u32 total;
    const u32 mine = __popc(is_above) | __popc(is_equal) << 16;
    const u32 before = lanes_before(mine, lane, &total);
    u32 my_above = above + (before & 0xffff), my_equal = equal + (before >> 16);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const bool tie = is_equal >> i & 1;
      if ((is_above >> i & 1) || (tie && my_equal < wanted))
        positions[my_above + smaller(my_equal, wanted)] = begin + at + i;
      my_above += is_above >> i & 1;
      my_equal += tie;
    }
    above += total & 0xffff;
    equal += total >> 16;
  });
  if (rank == 0 && thread == 0) arguments.kth[row] = bits_float(order_bits(threshold));
}
