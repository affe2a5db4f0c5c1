// Exact top-k of a row by one cluster of thread blocks; contract in kernels/reference/topk.py.
//
// Each block keeps its part of the row in shared memory as ordered keys, and the cluster fixes the
// k-th key by three digits of 11, 11 and 10 bits: a histogram in each block, summed in the first
// one's shared memory. What lies beyond shared memory is read again, so no distribution and no
// length can overflow anything. Then every block counts what it contributes, and writes it in
// ascending position after the blocks before it; ties on the k-th key go to the lower positions.
#include "device.cuh"

#ifndef TOPK_THREADS
#define TOPK_THREADS 1024
#endif
constexpr u32 THREADS = TOPK_THREADS;
constexpr u32 WARPS = THREADS / WARP;
constexpr u32 BINS = 2048;
constexpr u32 COPIES = 4;  // of a histogram: equal digits of a warp collide a quarter as often
constexpr u32 PASSES = 3;
constexpr u32 MAX_CLUSTER = 8;
constexpr u32 IN_FLIGHT = 4;  // vectors of four scores that a thread asks for at once

struct TopkShared {
  u32 histogram[BINS * COPIES];
  u32 totals[PASSES][BINS];     // the cluster's histograms; used in its first block
  u32 sums[2 * WARP];           // a pair for each warp
  u32 counts[2 * MAX_CLUSTER];  // above and equal to the k-th key, for each block
  u32 found[2];
  u32 pad[2];
  u32 keys[4];  // as many as fit
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

// A block's part of a row.
struct Part {
  const float* scores;  // its first
  u32* keys;
  u32 size;
  u32 cached;
  bool aligned;  // to sixteen bytes
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

DEVICE void count_one(u32* histogram, u32 key, u32 digit, bool counted, u32 lane) {
  if (counted && key != 0) atomicAdd(&histogram[digit * COPIES + lane % COPIES], 1u);
}

// Count the digits of four keys a lane whose upper bits are the prefix. All lanes take part.
DEVICE void count_digits(u32* histogram, Words keys, u32 shift, u32 mask, u64 prefix, u32 lane) {
  const u32 above = shift + (mask == BINS - 1 ? 11 : 10);
  const bool a = u64(keys.x) >> above == prefix, b = u64(keys.y) >> above == prefix;
  const bool c = u64(keys.z) >> above == prefix, d = u64(keys.w) >> above == prefix;
  const u32 digit = keys.x >> shift & mask;
  const bool same = a && b && c && d && keys.x != 0 && keys.w != 0 &&
                    keys.y >> shift == keys.x >> shift && keys.z >> shift == keys.x >> shift &&
                    keys.w >> shift == keys.x >> shift;
  const u32 first = __shfl_sync(ALL_LANES, digit, 0);
  // Equal scores, zeros above all, would serialise the warp on one counter.
  if (__all_sync(ALL_LANES, same && digit == first)) {
    if (lane == 0) atomicAdd(&histogram[first * COPIES], 4 * WARP);
    return;
  }
  count_one(histogram, keys.x, digit, a, lane);
  count_one(histogram, keys.y, keys.y >> shift & mask, b, lane);
  count_one(histogram, keys.z, keys.z >> shift & mask, c, lane);
  count_one(histogram, keys.w, keys.w >> shift & mask, d, lane);
}

// Load the part, keep its keys, and count their first digit.
DEVICE void load_and_count(const Part& part, u32* histogram, u32 thread) {
  const u32 lane = thread % WARP;
  for (u32 start = 0; start < part.size; start += THREADS * 4 * IN_FLIGHT) {
    Words bits[IN_FLIGHT];
#pragma unroll
    for (u32 i = 0; i < IN_FLIGHT; i++)
      bits[i] = read_scores(part, start + (i * THREADS + thread) * 4);
#pragma unroll
    for (u32 i = 0; i < IN_FLIGHT; i++) {
      const u32 at = start + (i * THREADS + thread) * 4;
      const Words keys = to_keys(part, at, bits[i]);
      if (at < part.cached) store_words(part.keys + at, keys);
      count_digits(histogram, keys, 21, BINS - 1, 0, lane);
    }
  }
}

DEVICE void count_again(const Part& part, u32* histogram, u32 shift, u32 mask, u32 prefix,
                        u32 thread) {
  for (u32 start = 0; start < part.size; start += THREADS * 4) {
    const Words keys = four_keys(part, start + thread * 4);
    count_digits(histogram, keys, shift, mask, prefix, thread % WARP);
  }
}

// Add this block's histogram to the cluster's, and clear it.
DEVICE void add_to_cluster(u32* histogram, u32* totals, u32 thread) {
  u32* target = peer(totals, 0);
  for (u32 bin = thread; bin < BINS; bin += THREADS) {
    const Words copies = load_words(histogram + bin * COPIES);
    const u32 count = copies.x + copies.y + copies.z + copies.w;
    if (count != 0) {
      atomicAdd(target + bin, count);
      store_words(histogram + bin * COPIES, {0, 0, 0, 0});
    }
  }
}

// Exclusive sum over the block's threads; `sums` is scratch for one number a warp.
DEVICE u32 threads_before(u32 value, u32* sums, u32 thread) {
  const u32 lane = thread % WARP, warp = thread / WARP;
  u32 total, ignored;
  const u32 before = lanes_before(value, lane, &total);
  if (lane == 0) sums[warp] = total;
  block_sync();
  const u32 other = lane < WARPS ? sums[lane] : 0;
  const u32 earlier = lanes_before(other, lane, &ignored);
  return before + __shfl_sync(ALL_LANES, earlier, warp);
}

// The digit that holds the wanted-th key from above, and how many keys lie above the digit.
DEVICE void find_digit(TopkShared* shared, const u32* totals, u32 wanted, u32 thread) {
  constexpr u32 EACH = BINS / THREADS;
  const u32 top = BINS - 1 - thread * EACH;  // this thread's highest bin
  u32 counts[EACH], sum = 0;
#pragma unroll
  for (u32 i = 0; i < EACH; i++) {
    counts[i] = totals[top - i];
    sum += counts[i];
  }
  u32 before = threads_before(sum, shared->sums, thread);
  if (before < wanted && wanted <= before + sum) {
    bool done = false;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
      if (!done && wanted <= before + counts[i]) {
        shared->found[0] = top - i;
        shared->found[1] = before;
        done = true;
      }
      before += counts[i];
    }
  }
  block_sync();
}

DEVICE u32 above_of(Words keys, u32 threshold) {  // one bit a key
  return u32(keys.x > threshold) | u32(keys.y > threshold) << 1 | u32(keys.z > threshold) << 2 |
         u32(keys.w > threshold) << 3;
}
DEVICE u32 equal_to(Words keys, u32 threshold) {
  return u32(keys.x == threshold) | u32(keys.y == threshold) << 1 | u32(keys.z == threshold) << 2 |
         u32(keys.w == threshold) << 3;
}

KERNEL(TOPK_THREADS, 1) void topk(ARGUMENTS TopkArguments arguments) {
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
  const Part part = {scores, shared->keys, size, smaller(arguments.cached, ceil_div(size, 4) * 4),
                     reinterpret_cast<u64>(scores) % 16 == 0};

  for (u32 i = thread * 4; i < BINS * COPIES; i += THREADS * 4)
    store_words(shared->histogram + i, {0, 0, 0, 0});
  for (u32 i = thread * 4; i < PASSES * BINS; i += THREADS * 4)
    store_words(&shared->totals[0][0] + i, {0, 0, 0, 0});
  block_sync();
  cluster_arrive();
  load_and_count(part, shared->histogram, thread);
  cluster_wait();  // every block's totals are zero

  u32 threshold = 0, wanted = k;
#pragma unroll
  for (u32 pass = 0; pass < PASSES; pass++) {
    block_sync();
    add_to_cluster(shared->histogram, shared->totals[pass], thread);
    cluster_arrive();
    cluster_wait();
    find_digit(shared, peer(shared->totals[pass], 0), wanted, thread);
    threshold = threshold << (pass == 2 ? 10 : 11) | shared->found[0];
    wanted -= shared->found[1];
    if (pass == 0) count_again(part, shared->histogram, 10, BINS - 1, threshold, thread);
    if (pass == 1) count_again(part, shared->histogram, 0, BINS / 2 - 1, threshold, thread);
  }

  // Each warp takes a run of the part, so that what it writes ascends.
  const u32 groups = ceil_div(size, 4 * WARP), each = ceil_div(groups, WARPS);
  const u32 first = smaller(warp * each, groups), last = smaller(first + each, groups);
  u32 above = 0, equal = 0;
  for (u32 group = first; group < last; group++) {
    const Words keys = four_keys(part, (group * WARP + lane) * 4);
    above += __popc(above_of(keys, threshold));
    equal += __popc(equal_to(keys, threshold));
  }
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
    u32* target = peer(shared->counts, thread);
    target[2 * rank] = block_above;
    target[2 * rank + 1] = block_equal;
  }
  cluster_arrive();
  cluster_wait();
  for (u32 other = 0; other < rank; other++) {
    above += shared->counts[2 * other];
    equal += shared->counts[2 * other + 1];
  }

  for (u32 group = first; group < last; group++) {
    const u32 at = (group * WARP + lane) * 4;
    const Words keys = four_keys(part, at);
    const u32 is_above = above_of(keys, threshold), is_equal = equal_to(keys, threshold);
    if (!__any_sync(ALL_LANES, (is_above | is_equal) != 0)) continue;
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
  }
  if (rank == 0 && thread == 0) arguments.kth[row] = bits_float(order_bits(threshold));
}
