// The common way to the k best of a row; for topk.cu.
//
// It reads a row once. A sample of it gives a lower bound that the k best most likely exceed, and
// not many others; each block lists what lies above the bound in its part of the row, in order of
// position, and sends its list to the others. Each for itself fixes the k-th key among those few.
// If the lists hold k keys or more, the k best of the row are among them, whatever the sample was
// worth. Then every block writes what it contributes after the blocks before it; ties on the k-th
// key go to the lower positions. Rows no longer than the lists may get are listed whole.
#pragma once
#include "topk_part.cuh"

constexpr u32 MAX_QUADS = 4;      // of samples of a thread
constexpr float EXPECTED = 64;    // samples among the k best, where a thread takes so few
constexpr u32 QUADS_AT_ONCE = 2;
constexpr u32 AT_ONCE = 6;        // groups that a warp asks for at once
constexpr u32 FINE_BITS = 11;     // of the digit that candidates are counted by
constexpr u32 FINE = 1 << FINE_BITS;
static_assert(FINE / THREADS % 4 == 0, "a lane reads its bins four at a time");

struct Summary {  // of a block's list
  u32 count;
  u32 highest;     // key; where everything is listed, of those that are finite
  u32 not_lowest;  // of those, ~ of the lowest key
  u32 unused;
};

// Shared memory of the common way; lists come after it.
struct ListShared {
  u32 histogram[FINE];
  u32 sums[4][WARP];  // one for each warp: of the sample, of two listings in turn, of the rest
  Summary summaries[MAX_CLUSTER];
  Summary mine;
  u32 before[2];      // above and equal to the k-th key's digits in the blocks before this one
  u32 last[WARP];     // the candidates that share those digits, where they are few
  u32 earlier[WARP];  // of those, whether a block before this one has them
  u32 last_count;
  u32 unused;
};
static_assert(sizeof(ListShared) == 9248, "LIST_SHARED_BYTES of topk.py");

struct Lists {
  u32* keys;    // of this block's part, those above the bound, in order of position
  u32* places;  // where in the part; not used where everything is listed
  u32* all;     // everybody's keys, a segment each
  i32* blocks;  // host blocks of the part
};

DEVICE Lists lists_after(const TopkArguments& a, ListShared* shared, u32 blocks) {
  u32* keys = reinterpret_cast<u32*>(shared + 1);
  u32* all = keys + 2 * a.listed;
  return {keys, keys + a.listed, blocks == 1 ? keys : all,
          reinterpret_cast<i32*>(all + a.segment * blocks)};
}

// Which scores of a row are its sample: four in each stretch, anywhere in it, lest they beat with a
// period of the scores. Every warp has WARPS-th quads, from the whole row. (One request to memory a
// quad: their number is what a sample costs.)
struct Sample {
  u32 each;  // quads of a thread
  u32 stride;
};

DEVICE Sample sample_of(u32 length, float quads_a_score) {
  const u32 enough = u32(quads_a_score * float(length)) + 1;
  u32 each = enough > 2 ? MAX_QUADS : enough, stride = length / THREADS / MAX_QUADS;
  stride = each == 1 ? length / THREADS : each == 2 ? length / THREADS / 2 : stride;
  if (stride < 4) each = length / THREADS < 4 ? 0 : 1, stride = length / THREADS;
  return {each, stride};
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
  if (lane == 0) shared->sums[0][thread / WARP] = found / WARPS;
  block_sync();
  return __reduce_add_sync(ALL_LANES, lane < WARPS ? shared->sums[0][lane] : 0);
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
  if (lane == 0) shared->sums[3][warp] = sum;
  block_sync();
  const u32 part_sum = lane < WARPS ? shared->sums[3][lane] : 0;
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

// Groups that a warp has at once, of a part of so many.
DEVICE u32 groups_at_once(u32 groups) { return smaller(ceil_div(groups, WARPS), AT_ONCE); }

DEVICE void read_groups(const Part& part, u32 first, u32 each, Words* bits, u32 lane) {
#pragma unroll
  for (u32 i = 0; i < AT_ONCE; i++) {
    bits[i] = {ALL_LANES, ALL_LANES, ALL_LANES, ALL_LANES};
    if (i < each && (first + i) * GROUP < part.size)
      bits[i] = read_scores(part, (first + i) * GROUP + lane * 4);
  }
}

DEVICE u32 reaching(Words bits, float limit) {  // one bit a score; none for NaN
  return u32(bits_float(bits.x) >= limit) | u32(bits_float(bits.y) >= limit) << 1 |
         u32(bits_float(bits.z) >= limit) << 2 | u32(bits_float(bits.w) >= limit) << 3;
}

// Three counts in one, of ten bits each.
constexpr u32 FIELD = 10, IN_ALL = 1 | 1 << FIELD | 1 << 2 * FIELD;
DEVICE u32 three_counts(u32 bits) {  // of four bits each
  return __popc(bits & 15) | __popc(bits & 240) << FIELD | __popc(bits & 3840) << 2 * FIELD;
}
DEVICE u32 field(u32 counts, u32 i) { return counts >> i * FIELD & ((1 << FIELD) - 1); }
DEVICE u32 sum_of_fields(u32 counts) {
  return field(counts, 0) + field(counts, 1) + field(counts, 2);
}

// List what reaches the bound, which exceeds the lowest key, in order; counts go on past the end of
// the list. `bits` are the warp's first groups.
DEVICE void list_candidates(const Part& part, const Lists& lists, ListShared* shared, u32 listed,
                            u32 bound, Words* bits, u32 thread) {
  const u32 lane = thread % WARP, warp = thread / WARP, groups = ceil_div(part.size, GROUP);
  const u32 each = groups_at_once(groups);
  const float limit = bits_float(order_bits(bound));
  u32 highest = 0, done = 0, side = 1;
#pragma unroll 1
  for (u32 start = 0; start < groups; start += each * WARPS, side = 3 - side) {
    const u32 first = start + warp * each;
    if (start != 0) read_groups(part, first, each, bits, lane);
    u32 found = 0;
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++)
      if (i < each) found |= reaching(bits[i], limit) << (4 * i);
    // Where each group's go: after the groups before, and after the lanes before in the same.
    u32 low_total, high_total = 0, all;
    u32 low = lanes_before(three_counts(found), lane, &low_total), high = 0;
    if (each > 3) high = lanes_before(three_counts(found >> 12), lane, &high_total);
    const u32 in_low = sum_of_fields(low_total);
    if (lane == 0) shared->sums[side][warp] = in_low + sum_of_fields(high_total);
    low += (low_total << FIELD) + (low_total << 2 * FIELD);
    high += (high_total << FIELD) + (high_total << 2 * FIELD) + in_low * IN_ALL;
    block_sync();
    const u32 of_warp = lane < WARPS ? shared->sums[side][lane] : 0;
    const u32 warps_before = lanes_before(of_warp, lane, &all);
    const u32 base = done + __shfl_sync(ALL_LANES, warps_before, warp);
    done += all;
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      if (i >= each || (found >> 4 * i & 15) == 0) continue;
      u32 at = base + field(i < 3 ? low : high, i % 3);
      const u32 place = (first + i) * GROUP + lane * 4;
      const auto add = [&](u32 number, u32 score) {
        if ((found >> (4 * i + number) & 1) == 0) return;
        const u32 key = order_key(score);
        highest = highest > key ? highest : key;
        if (at < listed) lists.keys[at] = key, lists.places[at] = place + number;
        at++;
      };
      add(0, bits[i].x);
      add(1, bits[i].y);
      add(2, bits[i].z);
      add(3, bits[i].w);
    }
  }
  highest = __reduce_max_sync(ALL_LANES, highest);
  if (lane == 0) atomicMax(&shared->mine.highest, highest);
  if (thread == 0) shared->mine.count = done;
}

// List everything, in order.
DEVICE void list_everything(const Part& part, const Lists& lists, ListShared* shared, Words* bits,
                            u32 thread) {
  const u32 lane = thread % WARP, warp = thread / WARP, groups = ceil_div(part.size, GROUP);
  const u32 each = groups_at_once(groups);
  u32 highest = 0, not_lowest = 0;
  const auto look_at = [&](u32 key) {
    if (key <= LOWEST || key >= HIGHEST) return;
    highest = highest > key ? highest : key;
    not_lowest = not_lowest > ~key ? not_lowest : ~key;
  };
#pragma unroll 1
  for (u32 start = 0; start < groups; start += each * WARPS) {
    const u32 first = start + warp * each;
    if (start != 0) read_groups(part, first, each, bits, lane);
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      const u32 at = (first + i) * GROUP + lane * 4;
      if (i >= each || at >= part.size) continue;
      const Words keys = to_keys(part, at, bits[i]);
      store_words(lists.keys + at, keys);
      look_at(keys.x);
      look_at(keys.y);
      look_at(keys.z);
      look_at(keys.w);
    }
  }
  highest = __reduce_max_sync(ALL_LANES, highest);
  not_lowest = __reduce_max_sync(ALL_LANES, not_lowest);
  if (lane == 0) atomicMax(&shared->mine.highest, highest);
  if (lane == 0) atomicMax(&shared->mine.not_lowest, not_lowest);
  if (thread == 0) shared->mine.count = part.size;
}

// Everybody's lists, as far as a lane knows: lane i of each warp has the length of block i's, and
// where in `all` its keys are.
struct Everybody {
  u32 blocks, count, start;
};

// Call visit(key, block) for each of everybody's candidates; lists start at multiples of four.
template <typename Visit>
DEVICE void for_each_candidate(const Lists& lists, const Everybody& every, u32 thread,
                               Visit visit) {
  const u32 lane = thread % WARP, warp = thread / WARP;
  const u32 warps_each = WARPS > every.blocks ? WARPS / every.blocks : 1;
  for (u32 other = warp / warps_each; other < every.blocks; other += WARPS) {
    const u32* keys = lists.all + __shfl_sync(ALL_LANES, every.start, other);
    const u32 count = __shfl_sync(ALL_LANES, every.count, other);
#pragma unroll 2
    for (u32 at = (warp % warps_each * WARP + lane) * 4; at < count; at += warps_each * GROUP) {
      const Words four = load_words(keys + at);
      visit(four.x, other);
      if (at + 1 < count) visit(four.y, other);
      if (at + 2 < count) visit(four.z, other);
      if (at + 3 < count) visit(four.w, other);
    }
  }
}

// This block's list to everybody, if it fits a segment.
DEVICE void send_list(const TopkArguments& a, const Lists& lists, ListShared* shared, u32 blocks,
                      u32 rank, u32 thread) {
  const Summary mine = shared->mine;
  if (thread < blocks) *peer(&shared->summaries[rank], thread) = mine;
  if (blocks == 1 || mine.count > u32(a.segment)) return;
  const u32 quads = ceil_div(mine.count, 4), shift = WARP - 1 - __clz(blocks);
  for (u32 i = thread; i < quads * blocks; i += THREADS) {
    const u32 at = (i >> shift) * 4;
    store_words(peer(lists.all + rank * a.segment + at, i & (blocks - 1)),
                load_words(lists.keys + at));
  }
}

// Lists that don't all fit their segments, from where they are.
DEVICE void gather_lists(const Lists& lists, const Everybody& every, u32 thread) {
  const u32 warp = thread / WARP;
  for (u32 other = 0; other < every.blocks; other++) {
    u32* to = lists.all + __shfl_sync(ALL_LANES, every.start, other);
    const u32 count = __shfl_sync(ALL_LANES, every.count, other);
    const u32* from = peer(lists.keys, other);
#pragma unroll 4
    for (u32 at = warp * WARP + thread % WARP; at < count; at += THREADS) to[at] = from[at];
  }
}

// How candidates are counted: by the upper digits of what their keys exceed the bound by; or, where
// everything is listed, by steps of the score itself, which spread better than keys around 0.
struct Digits {
  u32 bound, shift;
  float low, scale;  // scale 0: by keys
};

DEVICE bool is_exact(const Digits& digits) { return digits.shift == 0 && digits.scale == 0; }

DEVICE u32 digits_of(const Digits& digits, u32 key) {
  if (digits.scale == 0) return (key - digits.bound) >> digits.shift;
  // Rounding keeps the order.
  const float steps = (bits_float(order_bits(key)) - digits.low) * digits.scale;
  return steps < 0 ? 0 : steps < FINE - 1 ? u32(steps) : FINE - 1;
}

DEVICE Digits digits_between(u32 bound, u32 highest) {
  const u32 digits = WARP - __clz(highest - bound);
  return {bound, digits > FINE_BITS ? digits - FINE_BITS : 0, 0, 0};
}

DEVICE Digits steps_between(u32 lowest, u32 highest) {
  const float low = bits_float(order_bits(lowest)), width = bits_float(order_bits(highest)) - low;
  const bool usable = lowest < highest && width < 1e38f;  // nor are there scores of one value only
  return {0, WARP - FINE_BITS, low, usable ? __fdividef(FINE - 1, width) : 0};
}

// The k-th key, as far as it is known before those that share its digits are sorted out.
struct Kth {
  Digits digits;
  u32 prefix;   // its digits
  u32 sharing;  // so many keys have them; no more than WARP, unless digits are exact
  u32 wanted;   // so many of those are among the k best
};

DEVICE Kth digits_of_kth(const Lists& lists, ListShared* shared, const Everybody& every, u32 k,
                         const Digits& digits, u32 thread) {
  Kth kth = {digits, 0, 0, k};
  for_each_candidate(lists, every, thread,
                     [&](u32 key, u32) { count_fine(shared, digits_of(digits, key)); });
  kth.prefix = fine_digit(shared, &kth.wanted, &kth.sharing, thread);
  while (!is_exact(kth.digits) && kth.sharing > WARP) {
    block_sync();  // everybody has read the histogram
    for (u32 i = thread * 4; i < FINE; i += THREADS * 4)
      store_words(shared->histogram + i, {0, 0, 0, 0});
    block_sync();
    const bool anew = kth.digits.scale != 0;  // by keys
    if (anew) kth = {{kth.digits.bound, kth.digits.shift, 0, 0}, 0, 0, k};
    const u32 above = kth.digits.shift, step = anew ? 0 : smaller(above, FINE_BITS);
    const u32 mask = anew ? FINE - 1 : (1u << step) - 1;
    kth.digits.shift -= step;
    for_each_candidate(lists, every, thread, [&](u32 key, u32) {
      const u32 digits = digits_of(kth.digits, key);
      if (anew || digits >> step == kth.prefix) count_fine(shared, digits & mask);
    });
    kth.prefix = kth.prefix << step | fine_digit(shared, &kth.wanted, &kth.sharing, thread);
  }
  return kth;
}

// Note who shares the k-th key's digits, and count what the blocks before have above them.
DEVICE void look_closer(const Lists& lists, ListShared* shared, const Everybody& every,
                        const Kth& kth, u32 rank, u32 thread) {
  const bool exact = is_exact(kth.digits);
  u32 above = 0, equal = 0;
  for_each_candidate(lists, every, thread, [&](u32 key, u32 other) {
    const u32 digits = digits_of(kth.digits, key);
    if (digits < kth.prefix) return;
    const bool shares = digits == kth.prefix, earlier = other < rank;
    above += earlier && !shares;
    equal += earlier && shares && exact;
    if (!shares || exact) return;
    const u32 at = atomicAdd(&shared->last_count, 1u);
    shared->last[at] = key;
    shared->earlier[at] = earlier;
  });
  if (rank == 0) return;
  above = __reduce_add_sync(ALL_LANES, above);
  equal = __reduce_add_sync(ALL_LANES, equal);
  if (thread % WARP == 0 && above != 0) atomicAdd(&shared->before[0], above);
  if (thread % WARP == 0 && equal != 0) atomicAdd(&shared->before[1], equal);
}

// Write this block's share of the k best, in ascending position, and the k-th score.
DEVICE void write_best(const TopkArguments& a, const Lists& lists, ListShared* shared,
                       const Part& part, const Kth& kth, bool everything, u32 own, u32 row,
                       u32 rank, u32 thread) {
  const u32 lane = thread % WARP, warp = thread / WARP;
  u32 threshold = kth.digits.bound + kth.prefix, wanted = kth.wanted;
  u32 before = shared->before[0], ties_before = shared->before[1];
  if (!is_exact(kth.digits)) {
    threshold = rank_few(shared->last, kth.sharing, &wanted, lane);
    const u32 key = lane < kth.sharing && shared->earlier[lane] ? shared->last[lane] : 0;
    before += __popc(__ballot_sync(ALL_LANES, key > threshold));
    ties_before += __popc(__ballot_sync(ALL_LANES, key == threshold));
  }
  if (rank == 0 && thread == 0) a.kth[row] = bits_float(order_bits(threshold));
  const u32 each = ceil_div(own, 4 * THREADS) * 4, first = smaller(thread * each, own);
  const u32 last = smaller(first + each, own);
  // Above and equal in one: a part has fewer than 2^16 candidates.
  const auto kind = [&](u32 key, u32 at) {
    return at >= last || key < threshold ? 0 : key > threshold ? 1u : 1u << 16;
  };
  u32 mine = 0, ignored;
  for (u32 at = first; at < last; at += 4) {
    const Words keys = load_words(lists.keys + at);
    mine += kind(keys.x, at) + kind(keys.y, at + 1) + kind(keys.z, at + 2) + kind(keys.w, at + 3);
  }
  const u32 before_in_warp = lanes_before(mine, lane, &ignored);
  if (lane == WARP - 1) shared->sums[0][warp] = before_in_warp + mine;
  block_sync();
  const u32 warps_before =
      lanes_before(lane < WARPS ? shared->sums[0][lane] : 0, lane, &ignored);
  const u32 in_block = before_in_warp + __shfl_sync(ALL_LANES, warps_before, warp);
  before += in_block & 0xffff, ties_before += in_block >> 16;
  for (u32 at = first; at < last; at += 4) {
    const Words keys = load_words(lists.keys + at);
    const auto write = [&](u32 key, u32 nth) {
      const u32 is = kind(key, nth);
      if (is == 1 || (is != 0 && ties_before < wanted)) {
        const u32 position = part.begin + (everything ? nth : lists.places[nth]);
        write_chosen(a, row, before + smaller(ties_before, wanted), position, key,
                     lists.blocks + (position / BLOCK_TOKENS - part.begin / BLOCK_TOKENS));
      }
      before += is & 1, ties_before += is >> 16;
    };
    write(keys.x, at);
    write(keys.y, at + 1);
    write(keys.z, at + 2);
    write(keys.w, at + 3);
  }
}

// What `topk_by_lists` begins with; needs nothing of the row.
DEVICE void clear_lists(u32 thread) {
  ListShared* shared = reinterpret_cast<ListShared*>(shared_memory());
  for (u32 i = thread * 4; i < FINE; i += THREADS * 4)
    store_words(shared->histogram + i, {0, 0, 0, 0});
  if (thread == 0) {
    shared->mine = {0, 0, 0, 0};
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
  const u32 listed = a.listed, each = groups_at_once(ceil_div(part.size, GROUP));
  const bool everything = length <= listed;
  const Lists lists = lists_after(a, shared, blocks);
  cluster_arrive();  // nothing may be sent to a block that hasn't started
  const float* scores = a.scores + u64(row) * a.width;
  const Sample sample = everything ? Sample{0, 0} : sample_of(length, a.quads_a_score);
  Words sampled[QUADS_AT_ONCE];
  Words bits[AT_ONCE];
  if (!everything) read_sample(sample, scores, 0, sampled, thread);
  read_groups(part, thread / WARP * each, each, bits, lane);  // while the sample is looked at
  if (a.names.host_slots != nullptr)
    read_blocks(a.names.block_tables + request_row * a.names.num_blocks, part, lists, thread);
  u32 bound = 0;
  if (everything) {
    block_sync();
    list_everything(part, lists, shared, bits, thread);
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
  send_list(a, lists, shared, blocks, rank, thread);
  cluster_arrive();
  cluster_wait();

  Summary one = {0, 0, 0, 0};
  if (lane < blocks) one = shared->summaries[lane];
  u32 total, fours;
  const u32 before = lanes_before(ceil_div(one.count, 4) * 4, lane, &fours);
  total = __reduce_add_sync(ALL_LANES, one.count);
  const u32 highest = __reduce_max_sync(ALL_LANES, one.highest);
  if (total < k || total > listed) {
    cluster_arrive();
    cluster_wait();  // everybody has read the summaries: shared memory may serve the sure way
    block_sync();    // says within the block what the cluster has said; racecheck knows only this
    return false;
  }
  const u32 lowest = ~__reduce_max_sync(ALL_LANES, one.not_lowest);
  const Digits digits = everything ? steps_between(lowest, highest) : digits_between(bound, highest);
  const bool sent = blocks == 1 || __all_sync(ALL_LANES, one.count <= u32(a.segment));
  const Everybody every = {blocks, one.count, sent ? lane * a.segment : before};
  if (!sent) {
    gather_lists(lists, every, thread);
    cluster_arrive();  // this block reads no more
    block_sync();
  }
  const Kth kth = digits_of_kth(lists, shared, every, k, digits, thread);
  const u32 own = __shfl_sync(ALL_LANES, one.count, rank);
  look_closer(lists, shared, every, kth, rank, thread);
  block_sync();
  write_best(a, lists, shared, part, kth, everything, own, row, rank, thread);
  if (!sent) cluster_wait();
  return true;
}
