// Making a selection resident, and choosing in advance who must leave for it.
//
// `make_resident` does lookup, eviction, allocation, mapping, copy and translation in one launch;
// contract in recall.py. A warp owns the rows that its own entries miss: it claims them in the
// mapping and tells the grid that it has looked; then it sends for their bytes and takes the next
// names off the ready list while it waits for the rest of the grid, since a row that somebody else
// selects must not leave. Blocks that miss nothing don't wait at all. Nothing is sent for before a
// block has told the grid: the fence in that would wait for the rows, and lookups queue behind
// them. What has to be in order is in order by the barrier alone: priorities only ever rise while a
// selection is made resident, so that they are raised by atomic maxima, and a mapping carries its
// whole message.
#include "claims.cuh"

#ifndef RECALL_THREADS
#define RECALL_THREADS 512
#endif
constexpr u32 THREADS = RECALL_THREADS;
constexpr u32 WARPS = THREADS / WARP;
constexpr u32 WORDS_PER_LANE = 3;  // of sixteen bytes; longer rows don't stay in registers
constexpr u32 SCORES_HELD = 4;     // of a row's scores, how many a thread asks for at once
constexpr u32 LATE = 1u << 27;     // a place in the ready list that means "another's claim"

struct RecallShared {
  u32 low[WARPS], high[WARPS];
  u32 hits, recalled, evicted, allocated;
  u32 cutoff;  // of choose_victims
  u32 base;    // of append_rows: the block's first place in the ready list
  u32 pad[2];
};
static_assert(sizeof(RecallShared) == 4 * (2 * WARPS + 8), "_SHARED_BYTES of recall.py");

struct ResidentArguments {
  Layer layer;
  const i32* host_slots;  // [rows, k]
  const float* scores;    // [rows, k]
  i32* device_slots;      // [rows, k] out
  i32 k;
  i32 tiles;          // rows * tiles_per_row
  i32 tiles_per_row;  // a tile is what a block looks at at once, of one row
  i32 lanes;          // entries of a warp
  i32 depth;          // rows of a warp that are on their way at once; 0: not made of 16-byte words
  i32 pad;
};

struct RowWords {
  Words words[WORDS_PER_LANE];
};

DEVICE RowWords load_row(const u8* from, u32 words, u32 lane) {
  RowWords row;
#pragma unroll
  for (u32 i = 0; i < WORDS_PER_LANE; i++) {
    row.words[i] = {0, 0, 0, 0};
    if (lane + i * WARP < words) row.words[i] = load_row_words(from + (lane + i * WARP) * 16);
  }
  return row;
}

DEVICE void store_row(u8* to, const RowWords& row, u32 words, u32 lane) {
#pragma unroll
  for (u32 i = 0; i < WORDS_PER_LANE; i++)
    if (lane + i * WARP < words) store_row_words(to + (lane + i * WARP) * 16, row.words[i]);
}

DEVICE void copy_row(u8* to, const u8* from, u32 row_bytes, bool words_of_16, u32 lane) {
  if (words_of_16) {
    for (u32 at = 0; at < row_bytes; at += WORDS_PER_LANE * WARP * 16) {
      const u32 words = smaller((row_bytes - at) / 16, WORDS_PER_LANE * WARP);
      store_row(to + at, load_row(from + at, words, lane), words, lane);
    }
    return;
  }
  for (u32 at = lane; at < row_bytes; at += WARP) to[at] = from[at];
}

// Priorities of a row's entries: the step, then the place of a score within the row's range.
struct Range {
  float low, high;
};

struct Extremes {
  u32 low, high;
};

// This thread's share of a row: all of it in flight at once.
DEVICE Extremes extremes_of_row(const ResidentArguments& a, u32 row, u32 thread) {
  const i32* slots = a.host_slots + u64(row) * a.k;
  const float* scores = a.scores + u64(row) * a.k;
  Extremes found = {ALL_LANES, 0};
  for (u32 start = 0; start < u32(a.k); start += SCORES_HELD * THREADS) {
    i32 chosen[SCORES_HELD];
    float score[SCORES_HELD];
#pragma unroll
    for (u32 i = 0; i < SCORES_HELD; i++) {
      const u32 at = start + i * THREADS + thread;
      chosen[i] = at < u32(a.k) ? slots[at] : NONE;
      score[i] = at < u32(a.k) ? scores[at] : 0;
    }
#pragma unroll
    for (u32 i = 0; i < SCORES_HELD; i++) {
      if (chosen[i] < 0) continue;
      const u32 key = order_key(float_bits(score[i]));
      found.low = smaller(found.low, key);
      found.high = found.high > key ? found.high : key;
    }
  }
  return found;
}

DEVICE Range range_of_row(Extremes mine, RecallShared* shared, u32 thread) {
  const u32 lane = thread % WARP;
  u32 low = __reduce_min_sync(ALL_LANES, mine.low), high = __reduce_max_sync(ALL_LANES, mine.high);
  if (lane == 0) {
    shared->low[thread / WARP] = low;
    shared->high[thread / WARP] = high;
  }
  block_sync();
  low = __reduce_min_sync(ALL_LANES, lane < WARPS ? shared->low[lane] : ALL_LANES);
  high = __reduce_max_sync(ALL_LANES, lane < WARPS ? shared->high[lane] : 0);
  return {bits_float(order_bits(low)), bits_float(order_bits(high))};
}

DEVICE i32 level_of(float score, Range range) {
  float place = (score - range.low) / (range.high - range.low);
  if (!(place > 0)) place = 0;  // NaN too, as of 0 / 0
  place *= SCORE_LEVELS;
  return 1 + i32(place < SCORE_LEVELS - 1 ? place : SCORE_LEVELS - 1);
}

// An entry as its lane sees it.
struct Entry {
  u32 index;      // in host_slots
  i32 host_slot;  // -1: none
  i32 level;      // its priority
  bool missing;   // absent when looked up
  bool mine;      // and claimed here
  Victim victim;  // who leaves for it, when mine
};

// Entries of later tiles wait in device_slots, where their results will be.
DEVICE i32 pack(u32 place, i32 level, i32 floor) {
  return -2 - i32(place << SCORE_BITS | u32(level - floor));
}

DEVICE Entry entry_of(const ResidentArguments& a, u32 tile, u32 thread) {
  const u32 row = tile / a.tiles_per_row, part = tile % a.tiles_per_row, lane = thread % WARP;
  const u32 column = (part * WARPS + thread / WARP) * a.lanes + lane;
  Entry entry = {};
  entry.host_slot = entry.victim.slot = entry.victim.owner = NONE;
  entry.index = ALL_LANES;
  if (lane < u32(a.lanes) && column < u32(a.k)) {
    entry.index = row * a.k + column;
    entry.host_slot = a.host_slots[entry.index];
  }
  return entry;
}

DEVICE Entry unpack(const ResidentArguments& a, u32 tile, u32 thread, i32 floor) {
  Entry entry = entry_of(a, tile, thread);
  if (entry.host_slot < 0) return entry;
  const i32 state = a.device_slots[entry.index];
  entry.missing = state < NONE;
  if (entry.missing) {
    const u32 packed = u32(-2 - state), place = packed >> SCORE_BITS;
    entry.level = floor + i32(packed & SCORE_LEVELS);
    entry.mine = place != LATE;
    if (entry.mine) entry.victim = name_victim(a.layer, place);
  }
  return entry;
}

// Look an entry up: protect it where it is resident, claim it where it isn't.
DEVICE void look_up(const ResidentArguments& a, Entry* entry, i32 found, i32 floor,
                    RecallShared* shared, u32 lane) {
  const bool wanted = entry->host_slot >= 0, hit = wanted && found >= 0;
  bool first = false;
  entry->missing = wanted && !hit;
  if (hit)
    first = atomicMax(a.layer.priority + found, entry->level) <= floor && entry->level > floor;
  if (entry->missing) entry->mine = claim(a.layer, entry->host_slot);
  const u32 firsts = __ballot_sync(ALL_LANES, first);
  if (lane == 0 && firsts != 0) atomicAdd(&shared->hits, __popc(firsts));
}

// Places in the ready list for what the warp claimed.
DEVICE void take_places(const ResidentArguments& a, Entry* entry, u32 claimed, u32 lane) {
  if (claimed == 0) return;
  u32 base = 0;
  if (lane == 0) base = atomicAdd(a.layer.cursor, __popc(claimed));
  base = __shfl_sync(ALL_LANES, base, 0);
  entry->victim.place = base + __popc(claimed & ((1u << lane) - 1));
}

DEVICE u32 without_lowest(u32 lanes) { return lanes & (lanes - 1); }

// Rows of the warp's claims, as many as may be on their way: from host to shared memory.
DEVICE void send_for(const ResidentArguments& a, u8* landing, const Entry& entry, u32 claims,
                     u32 lane) {
  const u32 row_bytes = a.layer.row_bytes;
  for (u32 i = 0; i < u32(a.depth) && claims != 0; i++, claims = without_lowest(claims)) {
    const i32 host_slot = __shfl_sync(ALL_LANES, entry.host_slot, __ffs(claims) - 1);
    const u8* from = a.layer.host_rows + u64(u32(host_slot)) * row_bytes;
    for (u32 at = lane * 16; at < row_bytes; at += WARP * 16)
      copy_async(landing + i * row_bytes + at, from + at);
  }
}

// And on to their device slots; each lane moves what it sent for. Returns the claims that are left.
DEVICE u32 land(const ResidentArguments& a, const u8* landing, const Entry& entry, u32 claims,
                u32 lane) {
  const u32 row_bytes = a.layer.row_bytes;
  async_wait();
  for (u32 i = 0; i < u32(a.depth) && claims != 0; i++, claims = without_lowest(claims)) {
    const i32 slot = __shfl_sync(ALL_LANES, entry.victim.slot, __ffs(claims) - 1);
    if (slot < 0) continue;
    u8* to = a.layer.device_rows + u64(u32(slot)) * row_bytes;
    for (u32 at = lane * 16; at < row_bytes; at += WARP * 16)
      store_row_words(to + at, load_words(landing + i * row_bytes + at));
  }
  return claims;
}

DEVICE void copy_claims(const ResidentArguments& a, u8* landing, const Entry& entry, u32 claims,
                        bool sent, u32 lane) {
  if (a.depth == 0) {
    for (; claims != 0; claims = without_lowest(claims)) {
      const i32 host_slot = __shfl_sync(ALL_LANES, entry.host_slot, __ffs(claims) - 1);
      const i32 slot = __shfl_sync(ALL_LANES, entry.victim.slot, __ffs(claims) - 1);
      if (slot < 0) continue;
      copy_row(a.layer.device_rows + u64(u32(slot)) * a.layer.row_bytes,
               a.layer.host_rows + u64(u32(host_slot)) * a.layer.row_bytes, a.layer.row_bytes,
               false, lane);
    }
    return;
  }
  while (claims != 0) {
    if (!sent) send_for(a, landing, entry, claims, lane);
    claims = land(a, landing, entry, claims, lane);
    sent = false;
  }
}

// Wait for a row that another entry claimed, and raise its priority.
DEVICE void follow(const ResidentArguments& a, const Entry& entry) {
  const i32 slot = await_claim(a.layer, entry.host_slot);
  if (slot >= 0) atomicMax(a.layer.priority + slot, entry.level);
  a.device_slots[entry.index] = slot;
}

DEVICE void say_where(const ResidentArguments& a, const Entry& entry, i32 found) {
  if (entry.index != ALL_LANES && !entry.missing)
    a.device_slots[entry.index] = entry.host_slot >= 0 ? found : NONE;
}

KERNEL(RECALL_THREADS, 2) void make_resident(ARGUMENTS ResidentArguments a) {
  RecallShared* shared = reinterpret_cast<RecallShared*>(shared_memory());
  const u32 thread = thread_index(), lane = thread % WARP, block = block_index();
  u8* landing =
      shared_memory() + sizeof(RecallShared) + u64(thread / WARP) * a.depth * a.layer.row_bytes;
  wait_for_previous();
  const i32 floor = *a.layer.floor;
  if (thread == 0) shared->hits = shared->recalled = shared->evicted = shared->allocated = 0;

  Entry mine = {};
  i32 where = NONE;  // `mine` is, when it was looked up
  u32 claimed = 0;   // lanes of this warp that claimed a row, in the first tile
  bool missed = false;
  for (u32 tile = block; tile < u32(a.tiles); tile += grid_size()) {
    Entry entry = entry_of(a, tile, thread);
    const float score = entry.index != ALL_LANES ? a.scores[entry.index] : 0;
    const Extremes extremes = extremes_of_row(a, tile / a.tiles_per_row, thread);
    const i32 found =
        entry.host_slot >= 0 ? load_shared_value(a.layer.host_to_device + entry.host_slot) : NONE;
    if (tile != block) block_sync();  // the row before is read
    entry.level = floor + level_of(score, range_of_row(extremes, shared, thread));
    look_up(a, &entry, found, floor, shared, lane);
    missed = missed || entry.missing;
    const u32 claims = __ballot_sync(ALL_LANES, entry.mine);
    if (tile == block) {
      mine = entry;
      where = found;
      claimed = claims;
    } else {
      take_places(a, &entry, claims, lane);
      say_where(a, entry, found);
      if (entry.missing)
        a.device_slots[entry.index] = pack(entry.mine ? entry.victim.place : LATE, entry.level, floor);
    }
  }

  const bool wait = block_any(missed);
  u32 before = 0;
  if (thread == 0) before = grid_arrive(a.layer.barrier, block, grid_size());
  // All that needn't be seen by those who wait comes after the arrival.
  say_where(a, mine, where);
  if (thread == 0) add_total(a.layer.totals, HITS, shared->hits);
  if (!wait) return;
  send_for(a, landing, mine, claimed, lane);
  take_places(a, &mine, claimed, lane);
  if (mine.mine) mine.victim = name_victim(a.layer, mine.victim.place);
  if (thread == 0) grid_wait(a.layer.barrier, before);
  block_sync();

  u32 recalled = 0, evicted = 0, allocated = 0;  // of the warp
  for (u32 tile = block; tile < u32(a.tiles); tile += grid_size()) {
    const bool first = tile == block;
    Entry entry = first ? mine : unpack(a, tile, thread, floor);
    const u32 claims = first ? claimed : __ballot_sync(ALL_LANES, entry.mine);
    const bool settled = entry.mine && settle(a.layer, &entry.victim, entry.host_slot, entry.level, floor);
    if (entry.mine) a.device_slots[entry.index] = entry.victim.slot;
    recalled += __popc(claims);
    allocated += __popc(__ballot_sync(ALL_LANES, settled));
    evicted += __popc(__ballot_sync(ALL_LANES, settled && entry.victim.owner >= 0));
    copy_claims(a, landing, entry, claims, first, lane);
  }
  for (u32 tile = block; tile < u32(a.tiles); tile += grid_size()) {
    const Entry entry = tile == block ? mine : unpack(a, tile, thread, floor);
    if (entry.missing && !entry.mine) follow(a, entry);
  }
  if (lane == 0 && recalled != 0) {
    atomicAdd(&shared->recalled, recalled);
    atomicAdd(&shared->evicted, evicted);
    atomicAdd(&shared->allocated, allocated);
  }
  block_sync();
  if (thread == 0) {
    add_total(a.layer.totals, RECALLED, shared->recalled);
    add_total(a.layer.totals, EVICTED, shared->evicted);
    add_total(a.layer.totals, ALLOCATED, shared->allocated);
  }
}

// New rows: to host always, and to the device slots that they take in this step. A thread looks a
// row up, a warp moves it. One block, where that is enough, needs no barrier over the grid, and
// guesses before it has looked that every row is absent: who leaves is known when that is.
struct AppendArguments {
  Layer layer;
  const i32* host_slots;  // [rows], distinct
  const u8* rows;         // [rows, row_bytes]
  i32 num_rows;
  i32 each;    // rows of a block, at most THREADS
  i32 staged;  // whether a block's rows fit into its shared memory and are made of 16-byte words
  i32 pad;
};

// A block's rows, wherever they are read from.
struct NewRows {
  const u8* from;
  u8* stage;  // in shared memory
  u32 count;
};

DEVICE void stage_rows(const AppendArguments& a, const NewRows& rows, u32 warp, u32 lane) {
  const u32 row_bytes = a.layer.row_bytes;
  for (u32 row = warp; row < rows.count; row += WARPS)
    for (u32 at = lane * 16; at < row_bytes; at += WARP * 16)
      copy_async(rows.stage + row * row_bytes + at, rows.from + u64(row) * row_bytes + at);
}

// Each warp moves the rows that it staged.
DEVICE void move_rows(const AppendArguments& a, const NewRows& rows, u8* pool, const i32* slots,
                      u32 warp, u32 lane) {
  const u32 row_bytes = a.layer.row_bytes;
  for (u32 row = warp; row < rows.count; row += WARPS) {
    if (slots[row] < 0) continue;
    u8* to = pool + u64(u32(slots[row])) * row_bytes;
    if (a.staged) {
      for (u32 at = lane * 16; at < row_bytes; at += WARP * 16)
        store_row_words(to + at, load_words(rows.stage + row * row_bytes + at));
    } else {
      copy_row(to, rows.from + u64(row) * row_bytes, row_bytes, false, lane);
    }
  }
}

KERNEL(RECALL_THREADS, 2) void append_rows(ARGUMENTS AppendArguments a) {
  RecallShared* shared = reinterpret_cast<RecallShared*>(shared_memory());
  const u32 thread = thread_index(), lane = thread % WARP, warp = thread / WARP;
  const u32 first = block_index() * a.each;
  const NewRows rows = {a.rows + u64(first) * a.layer.row_bytes,
                        shared_memory() + sizeof(RecallShared) + THREADS * 4,
                        smaller(a.each, u32(a.num_rows) - first)};
  i32* slots = reinterpret_cast<i32*>(shared + 1);  // of the rows, in the device pool
  const bool alone = grid_size() == 1;
  wait_for_previous();
  if (a.staged) stage_rows(a, rows, warp, lane);
  if (thread == 0) shared->recalled = shared->evicted = shared->allocated = 0;

  const i32 floor = *a.layer.floor;
  const i32 host_slot = thread < rows.count ? a.host_slots[first + thread] : NONE;
  const u32 guess = alone ? u32(load_shared_value(a.layer.cursor)) + thread : 0;
  Victim victim = {ALL_LANES, NONE, NONE};
  if (alone && host_slot >= 0) victim = name_victim(a.layer, guess);
  const i32 found = host_slot >= 0 ? load_shared_value(a.layer.host_to_device + host_slot) : NONE;
  const bool missing = host_slot >= 0 && found < 0;
  if (found >= 0) atomicMax(a.layer.priority + found, floor);
  const u32 absent = __ballot_sync(ALL_LANES, missing);
  if (lane == 0) shared->low[warp] = __popc(absent);
  async_wait();
  if (alone) move_rows(a, rows, a.layer.host_rows, a.host_slots + first, warp, lane);
  block_sync();

  u32 total;
  const u32 warps_before = lanes_before(lane < WARPS ? shared->low[lane] : 0, lane, &total);
  u32 place = __shfl_sync(ALL_LANES, warps_before, warp) + __popc(absent & ((1u << lane) - 1));
  if (alone) {
    place += guess - thread;
    if (thread == 0 && total != 0) atomicAdd(a.layer.cursor, total);
  } else {
    if (thread == 0) {
      shared->base = total == 0 ? 0 : atomicAdd(a.layer.cursor, total);
      const u32 before = grid_arrive(a.layer.barrier, block_index(), grid_size());
      if (total != 0) grid_wait(a.layer.barrier, before);
    }
    move_rows(a, rows, a.layer.host_rows, a.host_slots + first, warp, lane);
  }
  block_sync();  // every row that is there is protected, every place is taken
  if (!alone) place += shared->base;

  i32 slot = found;
  bool settled = false;
  if (missing) {
    if (victim.place != place) victim = name_victim(a.layer, place);
    settled = settle(a.layer, &victim, host_slot, floor, floor);
    slot = victim.slot;
  }
  if (thread < rows.count) slots[thread] = slot;
  const u32 allocated = __popc(__ballot_sync(ALL_LANES, settled));
  const u32 evicted = __popc(__ballot_sync(ALL_LANES, settled && victim.owner >= 0));
  if (lane == 0 && absent != 0) {
    atomicAdd(&shared->recalled, __popc(absent));
    atomicAdd(&shared->allocated, allocated);
    atomicAdd(&shared->evicted, evicted);
  }
  block_sync();
  move_rows(a, rows, a.layer.device_rows, slots, warp, lane);
  if (thread == 0) {
    add_total(a.layer.totals, WRITTEN, shared->recalled);
    add_total(a.layer.totals, EVICTED, shared->evicted);
    add_total(a.layer.totals, ALLOCATED, shared->allocated);
  }
}

// Copying alone: one warp a row, over as many rows as there turn out to be.
struct GatherArguments {
  const i32* host_slots;   // [entries]
  const i32* count;        // [1]
  const i32* slot_buffer;  // [entries], -1 for none
  const u8* host_rows;
  u8* device_rows;
  i32 row_bytes;
  i32 words_of_16;
};

KERNEL(RECALL_THREADS, 2) void gather_rows(ARGUMENTS GatherArguments a) {
  const u32 lane = thread_index() % WARP, warps = grid_size() * WARPS;
  const u32 count = *a.count;
  for (u32 at = thread_index() / WARP * grid_size() + block_index(); at < count; at += warps) {
    const i32 slot = a.slot_buffer[at], host_slot = a.host_slots[at];
    if (slot < 0) continue;
    copy_row(a.device_rows + u64(slot) * a.row_bytes, a.host_rows + u64(host_slot) * a.row_bytes,
             a.row_bytes, a.words_of_16, lane);
  }
}

// Choosing victims: a counting sort of every layer's slots by age, oldest first, cut off at
// num_ready, by one cluster of blocks a layer. Free slots come first; what is protected never
// comes. Each block counts its part in shared memory and looks at the others' counts there.
constexpr u32 AGES = 8192;
constexpr u32 NO_AGE = ALL_LANES;
constexpr u32 AT_ONCE = 8;  // slots that a thread asks for at once

struct VictimShared {
  RecallShared head;
  u32 counts[AGES];
};

struct VictimArguments {
  const i32* floor;     // [1]
  const i32* priority;  // [layers, slots]
  i32* ready;           // [layers, slots] out
  i32* cursor;          // [layers] out
  i32 slots;
  i32 num_ready;
};

DEVICE u32 age_of(i32 priority, i32 floor) {
  if (priority < 0) return AGES - 1;
  if (priority >= floor) return NO_AGE;
  return smaller(u32(floor - 1 - priority), AGES - 2);
}

// Call visit(slot, age) for this thread's slots of [begin, end) that may leave.
template <typename Visit>
DEVICE void for_each_slot(const i32* priority, u32 begin, u32 end, i32 floor, u32 thread,
                          Visit visit) {
  for (u32 start = begin; start < end; start += AT_ONCE * THREADS) {
    i32 levels[AT_ONCE];
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      const u32 slot = start + i * THREADS + thread;
      levels[i] = slot < end ? priority[slot] : floor;
    }
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      const u32 age = age_of(levels[i], floor);
      if (age != NO_AGE) visit(start + i * THREADS + thread, age);
    }
  }
}

KERNEL(RECALL_THREADS, 2) void choose_victims(ARGUMENTS VictimArguments a) {
  VictimShared* shared = reinterpret_cast<VictimShared*>(shared_memory());
  const u32 thread = thread_index(), lane = thread % WARP, warp = thread / WARP;
  const u32 blocks = cluster_size(), rank = cluster_rank(), slots = a.slots;
  const u64 layer = block_index() / blocks;
  const i32 floor = *a.floor;
  const i32* priority = a.priority + layer * slots;
  i32* ready = a.ready + layer * slots;
  const u32 chunk = ceil_div(slots, blocks);
  const u32 begin = smaller(rank * chunk, slots), end = smaller(begin + chunk, slots);
  u32* counts = shared->counts;
  for (u32 i = thread; i < AGES; i += THREADS) counts[i] = 0;
  if (thread == 0) shared->head.cutoff = AGES;
  block_sync();
  for_each_slot(priority, begin, end, floor, thread,
                [&](u32, u32 age) { atomicAdd(&counts[age], 1u); });
  cluster_arrive();
  cluster_wait();

  constexpr u32 MINE = AGES / THREADS;
  const u32 lowest = AGES - (thread + 1) * MINE;  // a run of ages, read upwards, summed downwards
  u32 all[MINE], earlier[MINE], sum = 0;          // in the layer, and in the blocks before this one
#pragma unroll
  for (u32 i = 0; i < MINE; i++) all[i] = earlier[i] = 0;
  for (u32 other = 0; other < blocks; other++) {
    const u32* theirs = peer(counts + lowest, other);
#pragma unroll
    for (u32 i = 0; i < MINE; i++) {
      const u32 count = theirs[i];
      all[i] += count;
      earlier[i] += other < rank ? count : 0;
      sum += count;
    }
  }
  u32 total, everyone;
  const u32 before_in_warp = lanes_before(sum, lane, &total);
  if (lane == 0) shared->head.low[warp] = total;
  cluster_arrive();
  cluster_wait();  // the counts are read, everywhere
  const u32 warps_before = lanes_before(lane < WARPS ? shared->head.low[lane] : 0, lane, &everyone);
  u32 before = before_in_warp + __shfl_sync(ALL_LANES, warps_before, warp);
  u32 cutoff = AGES;
#pragma unroll
  for (u32 i = MINE; i-- > 0;) {
    if (before < u32(a.num_ready)) cutoff = lowest + i;
    counts[lowest + i] = before + earlier[i];
    before += all[i];
  }
  atomicMin(&shared->head.cutoff, cutoff);
  block_sync();
  const u32 youngest = shared->head.cutoff;
  for_each_slot(priority, begin, end, floor, thread, [&](u32 slot, u32 age) {
    if (age < youngest) return;
    const u32 at = atomicAdd(&counts[age], 1u);
    if (at < u32(a.num_ready)) ready[at] = slot;
  });
  if (rank != 0) return;
  if (thread == 0) a.cursor[layer] = 0;
  for (u32 at = everyone + thread; at < u32(a.num_ready); at += THREADS) ready[at] = NONE;
}
