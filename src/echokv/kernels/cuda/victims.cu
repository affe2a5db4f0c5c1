// Choosing victims: a counting sort of a layer's slots by age, oldest first, by one cluster of
// blocks. Free slots come first; what is protected never comes. Each block counts its part in
// shared memory and looks at the others' counts there. A layer whose list still has as many names
// as a step may take keeps it (see claims.cuh for why it is in order still), less the first names
// that have been used since: a recall that came upon one would look further while others wait. Then the
// rows that are next to leave do, so that the step finds their slots free.
#include "claims.cuh"

#ifndef VICTIM_THREADS
#define VICTIM_THREADS 512
#endif
constexpr u32 THREADS = VICTIM_THREADS;
constexpr u32 WARPS = THREADS / WARP;
constexpr u32 AGES = 8192;
constexpr u32 NO_AGE = ALL_LANES;
constexpr u32 AT_ONCE = 8;            // slots that a thread asks for at once
constexpr u32 MINE = AGES / THREADS;  // ages whose counts a thread adds up

constexpr u32 FREED_AT_ONCE = 4;      // slots of a thread
constexpr u32 TRIMMED = 4 * THREADS;   // names at the front of a list that are looked at

struct VictimShared {
  u32 totals[WARPS];
  u32 counts[AGES];  // at bin_of(age)
};

struct VictimArguments {
  const i32* floor;     // [1]
  i32* priority;        // [layers, slots]
  i32* device_to_host;  // [layers, slots]
  u8* device_free;      // [layers, slots]
  i32* host_to_device;  // [layers, host_slots]
  i32* ready;           // [layers, slots] out
  i32* cursor;          // [layers, CURSOR]
  u64* totals;          // [layers, TOTALS]
  i32 slots, host_slots;
  i32 most_rows;  // names that must be left
  i32 most_free;  // slots that are free ahead of need, at most
  i32 partly;     // whether so many are when more are needed; otherwise none is
};

DEVICE u32 age_of(i32 priority, i32 floor) {
  if (priority < 0) return AGES - 1;
  if (priority >= floor) return NO_AGE;
  return smaller(u32(floor - 1 - priority), AGES - 2);
}

// Neighbouring ages are a bank apart for a thread's run of them, not for a warp's.
DEVICE u32 bin_of(u32 age) { return age % MINE * THREADS + age / MINE; }

// Some of the warp's slots, and where they come among those of their age in this block.
struct Aged {
  u32 ages[AT_ONCE];  // NO_AGE for none
  u32 same[AT_ONCE];  // lanes whose age is that of the first that has one
  u32 before[AT_ONCE];
};

DEVICE u32 leader_of(u32 same) { return __ffs(same) - 1; }

// Add a thread's slots to the counts. Many slots may have the same age, such as free ones: of one
// age the warp adds its slots up first.
DEVICE void add_slots(u32* counts, const i32* priority, u32 start, u32 end, i32 floor, u32 thread,
                      Aged* slots) {
  const u32 lane = thread % WARP;
  i32 levels[AT_ONCE];
#pragma unroll
  for (u32 i = 0; i < AT_ONCE; i++) {
    const u32 slot = start + i * THREADS + thread;
    levels[i] = slot < end ? priority[slot] : floor;
  }
#pragma unroll
  for (u32 i = 0; i < AT_ONCE; i++) {
    const u32 age = age_of(levels[i], floor), some = __ballot_sync(ALL_LANES, age != NO_AGE);
    const u32 common = __shfl_sync(ALL_LANES, age, some == 0 ? 0 : leader_of(some));
    const u32 same = __ballot_sync(ALL_LANES, age == common);
    const bool leads = lane == leader_of(same);
    if (age != NO_AGE && (leads || age != common))
      slots->before[i] = atomicAdd(counts + bin_of(age), leads ? __popc(same) : 1u);
    slots->ages[i] = age;
    slots->same[i] = same;
  }
}

// A slot's place among those of its age, for all lanes.
DEVICE u32 place_of(const Aged& slots, u32 i, u32 lane) {
  const u32 same = slots.same[i];
  const u32 first = __shfl_sync(ALL_LANES, slots.before[i], leader_of(same));
  return same >> lane & 1 ? first + __popc(same & ((1u << lane) - 1)) : slots.before[i];
}

// Whether as many names are left as a step may take, by a count of what has left the list.
DEVICE bool lasts(const i32* cursor, i32 floor, i32 most_rows) {
  const bool rebased = cursor[SINCE] > floor;  // priorities have fallen since
  return !rebased && cursor[LISTED] - cursor[TAKEN] - cursor[TOUCHED] >= most_rows;
}

// Move those of the first names that have been used since over the edge, and the others back: so many
// that as many as `ahead` are at the front.
DEVICE void trim(const VictimArguments& a, VictimShared* shared, i32* cursor, u64 layer, u32 ahead,
                 u32 thread) {
  constexpr u32 EACH = TRIMMED / THREADS;
  const u32 lane = thread % WARP, warp = thread / WARP;
  const u32 taken = cursor[TAKEN], listed = u32(cursor[LISTED]) - taken;
  const i32 since = cursor[SINCE];
  const i32* priority = a.priority + layer * a.slots;
  i32* ready = a.ready + layer * a.slots + taken;
  const u32 looked_at = smaller((1 + ahead / TRIMMED) * TRIMMED, listed);
  u32 used = looked_at;  // less those that stay, which end where the names do that were looked at
  for (u32 window = ceil_div(looked_at, TRIMMED); window-- > 0;) {
    const u32 begin = window * TRIMMED + warp * EACH * WARP;  // a warp's names are neighbours
    i32 names[EACH];
    u32 left[EACH], sum = 0, total;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
      const u32 at = begin + i * WARP + lane;
      names[i] = at < looked_at ? ready[at] : NONE;
    }
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
      left[i] = __ballot_sync(ALL_LANES, names[i] >= 0 && priority[names[i]] < since);
      sum += __popc(left[i]);
    }
    if (lane == 0) shared->totals[warp] = sum;
    block_sync();  // and all names are read
    const u32 before = lanes_before(lane < WARPS ? shared->totals[lane] : 0, lane, &total);
    used -= total;
    u32 to = used + __shfl_sync(ALL_LANES, before, warp);
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
      if (left[i] >> lane & 1) ready[to + __popc(left[i] & ((1u << lane) - 1))] = names[i];
      to += __popc(left[i]);
    }
    block_sync();  // and all totals are read
  }
  if (thread != 0 || used == 0) return;
  cursor[TAKEN] = taken + used;
  cursor[TOUCHED] -= used;
}

// How many slots to have free: half as many again as the last step took.
DEVICE u32 free_ahead(const i32* cursor, i32 most_free, i32 partly) {
  const u32 taken = cursor[TAKEN] - cursor[BEGAN], wanted = taken + taken / 2;
  return wanted <= u32(most_free) || partly ? smaller(wanted, most_free) : 0;
}

// Have the first names' slots free; all blocks of the layer, when the list is as it is to be.
DEVICE void free_slots(const VictimArguments& a, i32* cursor, u64 layer, u32 count, u32 thread) {
  cluster_arrive();
  cluster_wait();
  const u32 threads = cluster_size() * THREADS, first = cluster_rank() * THREADS + thread;
  const u32 taken = cursor[TAKEN], left = u32(cursor[LISTED]) - taken;
  const i32 since = cursor[SINCE];
  const i32* ready = a.ready + layer * a.slots + taken;
  i32* priority = a.priority + layer * a.slots;
  i32* device_to_host = a.device_to_host + layer * a.slots;
  u32 evicted = 0;
  for (u32 start = first; start < smaller(count, left); start += FREED_AT_ONCE * threads) {
    i32 slots[FREED_AT_ONCE], owners[FREED_AT_ONCE];
#pragma unroll
    for (u32 i = 0; i < FREED_AT_ONCE; i++) {
      const u32 at = start + i * threads;
      slots[i] = at < smaller(count, left) ? ready[at] : NONE;
    }
#pragma unroll
    for (u32 i = 0; i < FREED_AT_ONCE; i++) {
      owners[i] = NONE;
      if (slots[i] >= 0 && priority[slots[i]] < since) owners[i] = device_to_host[slots[i]];
    }
#pragma unroll
    for (u32 i = 0; i < FREED_AT_ONCE; i++) {
      if (owners[i] < 0) continue;
      a.host_to_device[layer * a.host_slots + owners[i]] = NONE;
      device_to_host[slots[i]] = priority[slots[i]] = NONE;
      a.device_free[layer * a.slots + slots[i]] = 1;
      evicted++;
    }
  }
  evicted = __reduce_add_sync(ALL_LANES, evicted);
  if (thread % WARP == 0) add_total(a.totals + layer * TOTALS, EVICTED, evicted);
  if (first == 0) cursor[BEGAN] = taken;
}

KERNEL(VICTIM_THREADS, 2) void choose_victims(ARGUMENTS VictimArguments a) {
  VictimShared* shared = reinterpret_cast<VictimShared*>(shared_memory());
  const u32 thread = thread_index(), lane = thread % WARP, warp = thread / WARP;
  const u32 blocks = cluster_size(), rank = cluster_rank(), slots = a.slots;
  const u64 layer = block_index() / blocks;
  i32* cursor = a.cursor + layer * CURSOR;
  const i32 floor = *a.floor;
  const u32 ahead = free_ahead(cursor, a.most_free, a.partly);
  if (lasts(cursor, floor, a.most_rows)) {  // so say all blocks of the cluster
    cluster_arrive();
    cluster_wait();  // they have
    if (rank == 0) trim(a, shared, cursor, layer, ahead, thread);
    return free_slots(a, cursor, layer, ahead, thread);
  }
  const i32* priority = a.priority + layer * slots;
  const u32 chunk = ceil_div(slots, blocks);
  const u32 begin = smaller(rank * chunk, slots), end = smaller(begin + chunk, slots);
  u32* counts = shared->counts;
  for (u32 i = thread; i < AGES; i += THREADS) counts[i] = 0;
  block_sync();
  Aged some;
  for (u32 start = begin; start < end; start += AT_ONCE * THREADS)
    add_slots(counts, priority, start, end, floor, thread, &some);
  cluster_arrive();
  cluster_wait();

  const u32 lowest = AGES - (thread + 1) * MINE;  // a run of ages, read upwards, summed downwards
  u32 all[MINE], earlier[MINE], sum = 0;          // in the layer, and in the blocks before this one
#pragma unroll
  for (u32 i = 0; i < MINE; i++) all[i] = earlier[i] = 0;
  for (u32 other = 0; other < blocks; other++) {
    const u32* theirs = peer(counts, other);
#pragma unroll
    for (u32 i = 0; i < MINE; i++) {
      const u32 count = theirs[bin_of(lowest + i)];
      all[i] += count;
      earlier[i] += other < rank ? count : 0;
      sum += count;
    }
  }
  u32 total, everyone;
  const u32 before_in_warp = lanes_before(sum, lane, &total);
  if (lane == 0) shared->totals[warp] = total;
  cluster_arrive();
  cluster_wait();  // the counts are read, everywhere
  const u32 warps_before = lanes_before(lane < WARPS ? shared->totals[lane] : 0, lane, &everyone);
  u32 before = before_in_warp + __shfl_sync(ALL_LANES, warps_before, warp);
#pragma unroll
  for (u32 i = MINE; i-- > 0;) {
    counts[bin_of(lowest + i)] = before + earlier[i];
    before += all[i];
  }
  block_sync();
  i32* ready = a.ready + layer * slots;
  for (u32 start = begin; start < end; start += AT_ONCE * THREADS) {
    add_slots(counts, priority, start, end, floor, thread, &some);
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      const u32 at = place_of(some, i, lane);
      if (some.ages[i] != NO_AGE) ready[at] = start + i * THREADS + thread;
    }
  }
  if (rank == 0 && thread == 0) {
    cursor[TAKEN] = cursor[TOUCHED] = 0;
    cursor[LISTED] = everyone;
    cursor[SINCE] = floor;
  }
  free_slots(a, cursor, layer, ahead, thread);
}
