// The common way to the k best of a row; for topk.cu.
//
// It reads a row once. A sample of it gives a lower bound that the k best most likely exceed, and
// not many others; each block lists what lies above the bound in its part of the row, the blocks
// read each other's lists, and each for itself fixes the k-th key among those few. If the lists
// hold k keys or more, the k best of the row are among them, whatever the sample was worth. Then
// every block marks what it contributes in a map of its part, and writes it in ascending position
// after the blocks before it; ties on the k-th key go to the lower positions. Rows no longer than
// the lists may get are listed whole.
#pragma once
#include "topk_part.cuh"

constexpr u32 MAX_QUADS = 4;      // of samples of a thread
constexpr u32 QUADS_AT_ONCE = 2;
constexpr u32 AT_ONCE = 6;        // groups that a warp asks for at once
constexpr u32 FINE_BITS = 11;     // of the digit that candidates are counted by
constexpr u32 FINE = 1 << FINE_BITS;
constexpr u32 MARKED_AT_ONCE = 4;  // candidates of a thread
constexpr u32 NOWHERE = ALL_LANES;
static_assert(FINE / THREADS % 4 == 0, "a lane reads its bins four at a time");

struct Summary {  // of a block's list
  u32 count, highest;
};

// Shared memory of the common way; lists and maps come after it.
struct ListShared {
  u32 histogram[FINE];
  u32 sums[WARP];  // one for each warp
  Summary summaries[MAX_CLUSTER];
  Summary mine;
  u32 before[2];   // above and equal to the k-th key in the blocks before this one
  u32 last[WARP];  // the candidates that share the k-th key's digits, where they are few
  u32 last_count;
  u32 unused[3];
};
static_assert(sizeof(ListShared) == 8608, "LIST_SHARED_BYTES of topk.py");

struct Lists {
  u32* keys;    // of this block's part, those above the bound, in any order
  u32* places;  // where in the part; not used where everything is listed, in order
  u32* all;     // everybody's keys, in the order of the blocks
  u32* above;   // one bit a place
  u32* equal;
  u32* counts;  // of both in the words before, two counts in one
  i32* blocks;  // host blocks of the part
};

DEVICE Lists lists_after(ListShared* shared, u32 listed, u32 chunk, u32 blocks) {
  u32* keys = reinterpret_cast<u32*>(shared + 1);
  u32* above = keys + 3 * listed;
  const u32 words = ceil_div(chunk, WARP);
  return {keys,          keys + listed,     blocks == 1 ? keys : keys + 2 * listed, above,
          above + words, above + 2 * words, reinterpret_cast<i32*>(above + 3 * words)};
}

// Which scores of a row are its sample: four in each stretch, anywhere in it, lest they beat with a
// period of the scores. Every warp has WARPS-th quads, from the whole row. (One request to memory a
// quad: their number is what a sample costs.)
struct Sample {
  u32 each;  // quads of a thread
  u32 stride;
};

DEVICE Sample sample_of(u32 length, float quads_a_score) {
  const u32 enough = u32(quads_a_score * float(length)) + 1, of_thread = length / THREADS;
  const u32 each = enough > 2 ? MAX_QUADS : enough;  // 1, 2 or 4: shifts, where others divide
  const u32 stride = of_thread >> (each == MAX_QUADS ? 2 : each - 1);
  if (stride >= 4) return {each, stride};
  return {of_thread >= 4 ? 1u : 0u, of_thread};
}

DEVICE void read_sample(const Sample& sample, const float* scores, u32 first, Words* bits,
                        u32 thread) {
  const bool aligned = reinterpret_cast<u64>(scores) % sizeof(Words) == 0;
#pragma unroll
  for (u32 i = 0; i < QUADS_AT_ONCE; i++) {
    const u32 number = ((first + i) * WARP + thread % WARP) * WARPS + thread / WARP;
    const u32 within = u32(u64(number * 0x9e3779b1u) * (sample.stride - 3) >> 32);
    const u32 at = number * sample.stride + within;
    bits[i] = {ALL_LANES, ALL_LANES, ALL_LANES, ALL_LANES};  // NaNs
    if (first + i >= sample.each) continue;
    if (aligned)
      bits[i] = load_words(scores + at / 4 * 4);
    else
      bits[i] = {float_bits(scores[at]), float_bits(scores[at + 1]), float_bits(scores[at + 2]),
                 float_bits(scores[at + 3])};
  }
}

// A bound above which more than k keys of the row lie, though not many more; most likely: the mean
// of what each warp finds at the wanted rank of its samples. `bits` are a thread's first ones.
DEVICE u32 sampled_bound(const Sample& sample, ListShared* shared, const float* scores, u32 k,
                         Words* bits, u32 thread) {
  const u32 lane = thread % WARP;
  // Five standard deviations more than are expected: 5 sqrt(x) <= 5 x / 16 + 20.
  const float expected = __fdividef(4 * float(k), float(sample.stride));
  const u32 rank = u32((expected * 1.3125f + 24) * (1.0f / WARPS)) + 1;
  u32 best = 0, second = 0;  // of this lane: a third among the warp's best is rare, and lowers it
  const auto keep = [&](u32 key) {
    const u32 lower = smaller(best, key);
    best = best > key ? best : key;
    second = second > lower ? second : lower;
  };
  for (u32 first = 0; first < sample.each; first += QUADS_AT_ONCE) {
    if (first != 0) read_sample(sample, scores, first, bits, thread);
#pragma unroll
    for (u32 i = 0; i < QUADS_AT_ONCE; i++) {
      if (first + i >= sample.each) continue;
      keep(order_key(bits[i].x));
      keep(order_key(bits[i].y));
      keep(order_key(bits[i].z));
      keep(order_key(bits[i].w));
    }
  }
  u32 found = 0;
  for (u32 i = 0; i < rank; i++) {
    found = __reduce_max_sync(ALL_LANES, best);
    const u32 owner = __ffs(__ballot_sync(ALL_LANES, best == found)) - 1;
    if (lane == owner) best = second, second = 0;
  }
  if (lane == 0) shared->sums[thread / WARP] = found / WARPS;
  block_sync();
  return __reduce_add_sync(ALL_LANES, lane < WARPS ? shared->sums[lane] : 0);
}

// The digit of the wanted-th key from above in the histogram of candidates, whose bins begin with
// the highest; takes what lies above it off `wanted` and says how many share it. Every warp finds
// out for itself; the histogram may be written after the next barrier.
DEVICE u32 fine_digit(ListShared* shared, u32* wanted, u32* sharing, u32 thread) {
  constexpr u32 EACH = FINE / WARPS, OF_LANE = EACH / WARP;  // bins of a warp and of a lane
  const u32 lane = thread % WARP, warp = thread / WARP;
  const auto bins_of = [&](u32 part, u32* bins) {
    u32 sum = 0;
#pragma unroll
    for (u32 i = 0; i < OF_LANE; i += 4) {
      const Words four = load_words(shared->histogram + part * EACH + lane * OF_LANE + i);
      bins[i] = four.x, bins[i + 1] = four.y, bins[i + 2] = four.z, bins[i + 3] = four.w;
      sum += four.x + four.y + four.z + four.w;
    }
    return sum;
  };
  u32 bins[OF_LANE], ignored;
  block_sync();
  const u32 sum = __reduce_add_sync(ALL_LANES, bins_of(warp, bins));
  if (lane == 0) shared->sums[warp] = sum;
  block_sync();
  const u32 part_sum = lane < WARPS ? shared->sums[lane] : 0;
  const u32 parts_before = lanes_before(part_sum, lane, &ignored);
  const bool in_part = parts_before < *wanted && *wanted <= parts_before + part_sum;
  const u32 part = __ffs(__ballot_sync(ALL_LANES, in_part)) - 1;
  *wanted -= __shfl_sync(ALL_LANES, parts_before, part);
  const u32 lane_sum = bins_of(part, bins);
  u32 before = lanes_before(lane_sum, lane, &ignored);
  const bool here = before < *wanted && *wanted <= before + lane_sum;
  u32 place = 0, above = before, count = bins[0];
#pragma unroll
  for (u32 i = 1; i < OF_LANE; i++) {
    before += bins[i - 1];
    if (before < *wanted) place = i, above = before, count = bins[i];
  }
  const u32 owner = __ffs(__ballot_sync(ALL_LANES, here)) - 1;
  *wanted -= __shfl_sync(ALL_LANES, above, owner);
  *sharing = __shfl_sync(ALL_LANES, count, owner);
  return FINE - 1 - (part * EACH + owner * OF_LANE + __shfl_sync(ALL_LANES, place, owner));
}

// The wanted-th of a few keys from above, by a warp; takes what lies above it off `wanted`.
DEVICE u32 rank_few(const u32* keys, u32 count, u32* wanted, u32 lane) {
  const u32 key = lane < count ? keys[lane] : 0;
  u32 above = 0, equal = 0;
  for (u32 i = 0; i < count; i++) {
    const u32 other = __shfl_sync(ALL_LANES, key, i);
    above += other > key;
    equal += other == key;
  }
  const bool here = lane < count && above < *wanted && *wanted <= above + equal;
  const u32 owner = __ffs(__ballot_sync(ALL_LANES, here)) - 1;
  *wanted -= __shfl_sync(ALL_LANES, above, owner);
  return __shfl_sync(ALL_LANES, key, owner);
}

DEVICE void count_fine(ListShared* shared, u32 digit) {
  atomicAdd(&shared->histogram[FINE - 1 - digit], 1u);
}

DEVICE void read_groups(const Part& part, u32 start, Words* bits, u32 lane) {
#pragma unroll
  for (u32 i = 0; i < AT_ONCE; i++) {
    const u32 first = (start + i * WARPS) * GROUP;
    bits[i] = {ALL_LANES, ALL_LANES, ALL_LANES, ALL_LANES};
    if (first < part.size) bits[i] = read_scores(part, first + lane * 4);
  }
}

DEVICE u32 reaching(Words bits, float limit) {  // one bit a score; none for NaN
  return u32(bits_float(bits.x) >= limit) | u32(bits_float(bits.y) >= limit) << 1 |
         u32(bits_float(bits.z) >= limit) << 2 | u32(bits_float(bits.w) >= limit) << 3;
}

// List what reaches the bound, which exceeds the lowest key; counts go on past the end of the list.
// `bits` are the warp's first groups.
DEVICE void list_candidates(const Part& part, const Lists& lists, ListShared* shared, u32 listed,
                            u32 bound, Words* bits, u32 thread) {
  const u32 lane = thread % WARP, warp = thread / WARP, groups = ceil_div(part.size, GROUP);
  const float limit = bits_float(order_bits(bound));
  u32 highest = 0;
#pragma unroll 1
  for (u32 start = warp; start < groups; start += AT_ONCE * WARPS) {
    u32 found = 0;
    if (start != warp) read_groups(part, start, bits, lane);
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++)
      if (start + i * WARPS < groups) found |= reaching(bits[i], limit) << (4 * i);
    u32 total, base = 0;
    const u32 before = lanes_before(__popc(found), lane, &total);
    if (total == 0) continue;
    if (lane == 0) base = atomicAdd(&shared->mine.count, total);
    u32 at = __shfl_sync(ALL_LANES, base, 0) + before;
    for (; found != 0; found &= found - 1) {
      const u32 i = __ffs(found) - 1;
      const u32 place = (start + i / 4 * WARPS) * GROUP + lane * 4 + i % 4;
      Words words = bits[0];  // registers have no index
#pragma unroll
      for (u32 j = 1; j < AT_ONCE; j++)
        if (i / 4 == j) words = bits[j];
      const u32 low = i & 1 ? words.y : words.x, high = i & 1 ? words.w : words.z;
      const u32 key = order_key(i & 2 ? high : low);
      highest = highest > key ? highest : key;
      if (at < listed) lists.keys[at] = key, lists.places[at] = place;
      at++;
    }
  }
  highest = __reduce_max_sync(ALL_LANES, highest);
  if (lane == 0) atomicMax(&shared->mine.highest, highest);
}

// List everything, in order; count the first digits if this block is alone.
DEVICE void list_everything(const Part& part, const Lists& lists, ListShared* shared, u32 shift,
                            bool alone, Words* bits, u32 thread) {
  const u32 lane = thread % WARP, warp = thread / WARP, groups = ceil_div(part.size, GROUP);
#pragma unroll 1
  for (u32 start = warp; start < groups; start += AT_ONCE * WARPS) {
    if (start != warp) read_groups(part, start, bits, lane);
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      const u32 at = (start + i * WARPS) * GROUP + lane * 4;
      if (at >= part.size) continue;
      const Words keys = to_keys(part, at, bits[i]);
      store_words(lists.keys + at, keys);
      if (!alone) continue;
      count_fine(shared, keys.x >> shift);
      if (keys.y != 0) count_fine(shared, keys.y >> shift);
      if (keys.z != 0) count_fine(shared, keys.z >> shift);
      if (keys.w != 0) count_fine(shared, keys.w >> shift);
    }
  }
  if (thread == 0) shared->mine = {part.size, ALL_LANES};
}

// Everybody's candidates to this block, counting their first digit above the bound. Lane i of each
// warp knows the length of block i's list, and how many come before it.
DEVICE void gather_candidates(const Lists& lists, ListShared* shared, u32 blocks, u32 count,
                              u32 before, u32 bound, u32 shift, u32 thread) {
  const u32 lane = thread % WARP, warp = thread / WARP;
  const u32 warps_each = WARPS > blocks ? WARPS / blocks : 1;
  for (u32 other = warp / warps_each; other < blocks; other += WARPS) {
    const u32 size = __shfl_sync(ALL_LANES, count, other);
    u32* target = lists.all + __shfl_sync(ALL_LANES, before, other);
    const u32* source = peer(lists.keys, other);
#pragma unroll 4
    for (u32 at = warp % warps_each * WARP + lane; at < size; at += warps_each * WARP) {
      const u32 key = source[at];
      target[at] = key;
      count_fine(shared, (key - bound) >> shift);
    }
  }
}

// The wanted-th key from above of everybody's, whose first digit is counted; takes what lies above
// it off `wanted`.
DEVICE u32 kth_of_all(const Lists& lists, ListShared* shared, u32 total, u32 bound, u32 shift,
                      u32* wanted, u32 thread) {
  u32 sharing, prefix = fine_digit(shared, wanted, &sharing, thread);
  while (shift > 0 && sharing > WARP) {
    block_sync();  // everybody has read the histogram
    for (u32 i = thread * 4; i < FINE; i += THREADS * 4)
      store_words(shared->histogram + i, {0, 0, 0, 0});
    block_sync();
    const u32 step = smaller(shift, FINE_BITS), above = shift;
    shift -= step;
    for (u32 at = thread; at < total; at += THREADS) {
      const u32 key = lists.all[at] - bound;
      if (key >> above == prefix) count_fine(shared, key >> shift & ((1u << step) - 1));
    }
    prefix = prefix << step | fine_digit(shared, wanted, &sharing, thread);
  }
  if (shift == 0) return bound + prefix;
  for (u32 at = thread; at < total; at += THREADS) {
    const u32 key = lists.all[at];
    if ((key - bound) >> shift == prefix) shared->last[atomicAdd(&shared->last_count, 1u)] = key;
  }
  block_sync();
  return rank_few(shared->last, sharing, wanted, thread % WARP);
}

// Mark in the maps which of this block's candidates are above or equal to the k-th key.
DEVICE void mark(const Lists& lists, bool everything, u32 own, u32 threshold, u32 thread) {
  if (everything) {
    for (u32 start = thread / WARP * WARP; start < own; start += MARKED_AT_ONCE * THREADS) {
      u32 keys[MARKED_AT_ONCE];
#pragma unroll
      for (u32 i = 0; i < MARKED_AT_ONCE; i++) {
        const u32 at = start + i * THREADS + thread % WARP;
        keys[i] = at < own ? lists.keys[at] : 0;
      }
#pragma unroll
      for (u32 i = 0; i < MARKED_AT_ONCE; i++) {
        const u32 above = __ballot_sync(ALL_LANES, keys[i] > threshold);
        const u32 equal = __ballot_sync(ALL_LANES, keys[i] == threshold);
        const u32 word = (start + i * THREADS) / WARP;
        if (thread % WARP == 0 && word * WARP < own)
          lists.above[word] = above, lists.equal[word] = equal;
      }
    }
    return;
  }
  for (u32 at = thread; at < own; at += THREADS) {
    const u32 key = lists.keys[at], place = lists.places[at];
    if (key >= threshold)
      atomicOr((key > threshold ? lists.above : lists.equal) + place / WARP, 1u << place % WARP);
  }
}

// Write this block's share of the k best, in ascending position. A part of a row has fewer than
// 2^16 marks of either kind.
DEVICE void write_marked(const TopkArguments& a, const Lists& lists, ListShared* shared, u32 row,
                         bool everything, u32 own, u32 threshold, u32 begin, u32 words, u32 wanted,
                         u32 thread) {
  const u32 lane = thread % WARP, warp = thread / WARP;
  const u32 each = ceil_div(words, THREADS), first = smaller(thread * each, words);
  const u32 last = smaller(first + each, words);
  u32 mine = 0, ignored;
  for (u32 word = first; word < last; word++)
    mine += __popc(lists.above[word]) | __popc(lists.equal[word]) << 16;
  const u32 before_in_warp = lanes_before(mine, lane, &ignored);
  if (lane == WARP - 1) shared->sums[warp] = before_in_warp + mine;
  block_sync();
  const u32 warps_before = lanes_before(lane < WARPS ? shared->sums[lane] : 0, lane, &ignored);
  u32 before = before_in_warp + __shfl_sync(ALL_LANES, warps_before, warp);
  for (u32 word = first; word < last; word++) {
    lists.counts[word] = before;
    before += __popc(lists.above[word]) | __popc(lists.equal[word]) << 16;
  }
  block_sync();
  // Some at a time: what one waits for, the others wait for too.
  for (u32 start = 0; start < own; start += MARKED_AT_ONCE * THREADS) {
    u32 keys[MARKED_AT_ONCE], entries[MARKED_AT_ONCE], positions[MARKED_AT_ONCE];
#pragma unroll
    for (u32 i = 0; i < MARKED_AT_ONCE; i++) {
      const u32 at = start + i * THREADS + thread;
      entries[i] = NOWHERE;
      if (start + i * THREADS >= own) continue;
      keys[i] = at < own ? lists.keys[at] : 0;
      const u32 place = everything || at >= own ? smaller(at, own - 1) : lists.places[at];
      const u32 word = place / WARP, lower = (1u << place % WARP) - 1, counts = lists.counts[word];
      const u32 above = shared->before[0] + (counts & 0xffff) + __popc(lists.above[word] & lower);
      const u32 equal = shared->before[1] + (counts >> 16) + __popc(lists.equal[word] & lower);
      positions[i] = begin + place;
      if (keys[i] > threshold || (keys[i] == threshold && equal < wanted))
        entries[i] = above + smaller(equal, wanted);
    }
#pragma unroll
    for (u32 i = 0; i < MARKED_AT_ONCE; i++) {
      if (entries[i] == NOWHERE) continue;
      const u32 nth = positions[i] / BLOCK_TOKENS - begin / BLOCK_TOKENS;
      write_chosen(a, row, entries[i], positions[i], keys[i], lists.blocks + nth);
    }
  }
}

// What `topk_by_lists` begins with; needs nothing of the row.
DEVICE void clear_lists(const TopkArguments& a, u32 thread) {
  ListShared* shared = reinterpret_cast<ListShared*>(shared_memory());
  const Lists lists = lists_after(shared, a.listed, a.chunk, cluster_size());
  for (u32 i = thread * 4; i < FINE; i += THREADS * 4)
    store_words(shared->histogram + i, {0, 0, 0, 0});
  for (u32 i = thread; i < ceil_div(a.chunk, WARP); i += THREADS)
    lists.above[i] = lists.equal[i] = 0;
  if (thread == 0) {
    shared->mine = {0, 0};
    shared->before[0] = shared->before[1] = shared->last_count = 0;
  }
}

// Ask for the host blocks of this block's part; there at a barrier behind async_wait().
DEVICE void read_blocks(const i32* blocks, const Part& part, const Lists& lists, u32 thread) {
  const u32 first = part.begin / BLOCK_TOKENS, end = ceil_div(part.begin + part.size, BLOCK_TOKENS);
  for (u32 at = first + thread; at < end; at += THREADS)
    copy_word_async(lists.blocks + (at - first), blocks + at);
}

// False: the lists don't do, and nothing has been written. The same in the whole cluster.
DEVICE bool topk_by_lists(const TopkArguments& a, const Part& part, u32 row, u32 length,
                          i32 request_row, u32 thread) {
  ListShared* shared = reinterpret_cast<ListShared*>(shared_memory());
  const u32 lane = thread % WARP, blocks = cluster_size(), rank = cluster_rank(), k = a.k;
  const u32 words = ceil_div(part.size, WARP), listed = a.listed;
  const bool everything = length <= listed;
  const Lists lists = lists_after(shared, listed, a.chunk, blocks);
  cluster_arrive();  // nothing may be sent to a block that hasn't started
  const float* scores = a.scores + u64(row) * a.width;
  const Sample sample = everything ? Sample{0, 0} : sample_of(length, a.quads_a_score);
  Words sampled[QUADS_AT_ONCE];
  Words bits[AT_ONCE];
  if (!everything) read_sample(sample, scores, 0, sampled, thread);
  read_groups(part, thread / WARP, bits, lane);  // on their way while the sample is looked at
  if (a.names.host_slots != nullptr)
    read_blocks(a.names.block_tables + request_row * a.names.num_blocks, part, lists, thread);
  u32 bound = 0, shift = WARP - FINE_BITS;
  if (everything) {
    block_sync();
    list_everything(part, lists, shared, shift, blocks == 1, bits, thread);
  } else {
    bound = sampled_bound(sample, shared, scores, k, sampled, thread);
    if (bound > LOWEST)
      list_candidates(part, lists, shared, listed, bound, bits, thread);
    else if (thread == 0)
      shared->mine.count = listed + 1;  // too many
  }
  async_wait();
  cluster_wait();
  block_sync();
  if (thread < blocks) *peer(&shared->summaries[rank], thread) = shared->mine;
  cluster_arrive();
  cluster_wait();

  Summary one = {0, 0};
  if (lane < blocks) one = shared->summaries[lane];
  u32 total;
  const u32 all_before = lanes_before(one.count, lane, &total);
  const u32 highest = __reduce_max_sync(ALL_LANES, one.highest);
  if (total < k || total > listed) {
    cluster_arrive();
    cluster_wait();  // everybody has read the summaries: shared memory may serve the sure way
    block_sync();    // says within the block what the cluster has said; racecheck knows only this
    return false;
  }
  u32 wanted = k;
  if (!everything) {
    const u32 digits = WARP - __clz(highest - bound);
    shift = digits > FINE_BITS ? digits - FINE_BITS : 0;
  }
  if (!everything || blocks > 1)
    gather_candidates(lists, shared, blocks, one.count, all_before, bound, shift, thread);
  cluster_arrive();  // this block reads no more
  const u32 threshold = kth_of_all(lists, shared, total, bound, shift, &wanted, thread);

  const u32 before = __shfl_sync(ALL_LANES, all_before, rank);
  const u32 own = __shfl_sync(ALL_LANES, one.count, rank);
  u32 above = 0, equal = 0;
  for (u32 at = thread; at < before; at += THREADS) {
    above += lists.all[at] > threshold;
    equal += lists.all[at] == threshold;
  }
  above = __reduce_add_sync(ALL_LANES, above);
  equal = __reduce_add_sync(ALL_LANES, equal);
  if (lane == 0 && above != 0) atomicAdd(&shared->before[0], above);
  if (lane == 0 && equal != 0) atomicAdd(&shared->before[1], equal);
  mark(lists, everything, own, threshold, thread);
  block_sync();
  write_marked(a, lists, shared, row, everything, own, threshold, part.begin, words, wanted,
               thread);
  if (rank == 0 && thread == 0) a.kth[row] = bits_float(order_bits(threshold));
  cluster_wait();
  return true;
}
