// The sure way to the k best of a row; for topk.cu.
//
// The cluster fixes the k-th key by four digits of 8 bits over all keys, kept in registers as far
// as they fit, then in shared memory; the rest is read again. No distribution and no length can
// overflow anything here.
#pragma once
#include "topk_part.cuh"

constexpr u32 BITS = 8;
constexpr u32 BINS = 1 << BITS;
constexpr u32 PASSES = 4;
#ifndef TOPK_HELD
#define TOPK_HELD 4
#endif
constexpr u32 HELD = TOPK_HELD;  // of its groups, how many it holds in registers
constexpr u32 TOGETHER = 2;      // and of the others, how many it asks for at once
static_assert(BINS / WARPS <= WARP, "a lane a bin");

struct TopkShared {
  u32 columns[BINS * WARP];            // a digit's counts, one column a lane
  u32 counts[2][MAX_CLUSTER][BINS];    // of every block, from this pass and the one before
  u32 totals[BINS];                    // their sum
  u32 sums[2 * WARP];                  // a pair for each warp
  u32 contributions[2 * MAX_CLUSTER];  // above and equal to the k-th key, for each block
  u32 keys[4];                         // as many as fit
};
static_assert(sizeof(TopkShared) == 66960, "FIXED_SHARED_BYTES of topk.py");

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
  for (u32 start = part.first + HELD; start < part.last; start += TOGETHER) {
    Words keys[TOGETHER];
#pragma unroll
    for (u32 i = 0; i < TOGETHER; i++) keys[i] = four_keys(part, (start + i) * GROUP + lane * 4);
#pragma unroll
    for (u32 i = 0; i < TOGETHER; i++)
      if (start + i < part.last) visit(keys[i], (start + i) * GROUP + lane * 4);
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

// The digit of the wanted-th key, by counts that begin with the highest digit's; takes what lies
// above it off `wanted`. Every warp for itself: eight bins a lane.
DEVICE u32 digit_of(const u32* totals, u32* wanted, u32 lane) {
  const Words low = load_words(totals + lane * 8);
  const Words high = load_words(totals + lane * 8 + 4);
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

// The same in the cluster's counts.
DEVICE u32 find_digit(TopkShared* shared, u32 side, u32 blocks, u32* wanted, u32 thread) {
  for (u32 bin = thread; bin < BINS; bin += THREADS) {
    u32 sum = 0;
    for (u32 other = 0; other < blocks; other++) sum += shared->counts[side][other][bin];
    shared->totals[BINS - 1 - bin] = sum;  // from above
  }
  block_sync();
  return digit_of(shared->totals, wanted, thread % WARP);
}

DEVICE u32 above_of(Words keys, u32 threshold) {  // one bit a key
  return u32(keys.x > threshold) | u32(keys.y > threshold) << 1 | u32(keys.z > threshold) << 2 |
         u32(keys.w > threshold) << 3;
}
DEVICE u32 equal_to(Words keys, u32 threshold) {
  return u32(keys.x == threshold) | u32(keys.y == threshold) << 1 | u32(keys.z == threshold) << 2 |
         u32(keys.w == threshold) << 3;
}

DEVICE u32 key_of(Words keys, u32 i) {
  return i & 2 ? (i & 1 ? keys.w : keys.z) : (i & 1 ? keys.y : keys.x);
}

DEVICE void topk_by_digits(const TopkArguments& a, const Part& part, u32 row, u32 thread) {
  TopkShared* shared = reinterpret_cast<TopkShared*>(shared_memory());
  const u32 lane = thread % WARP, warp = thread / WARP;
  const u32 blocks = cluster_size(), rank = cluster_rank(), k = a.k;
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

  const i32* host_blocks = a.names.host_slots != nullptr ? blocks_of(a, row) : nullptr;
  const auto write = [&](u32 at, u32 position, u32 key) {
    write_chosen(a, row, at, position, key, host_blocks + position / BLOCK_TOKENS);
  };
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
        write(my_above + smaller(my_equal, wanted), part.begin + at + i, key_of(keys, i));
      my_above += is_above >> i & 1;
      my_equal += tie;
    }
    above += total & 0xffff;
    equal += total >> 16;
  });
  if (rank == 0 && thread == 0) a.kth[row] = bits_float(order_bits(threshold));
}
