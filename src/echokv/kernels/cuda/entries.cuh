// A selection's entries, as the threads of `make_resident` see them; recall.cu has the order.
//
// A thread has one entry of a tile, with a priority: the step, then the place of its score within
// its row's range, which each of the row's blocks finds for itself. An entry that is found is
// protected, and its answer is known. An absent one is claimed: by this thread, whose block then
// moves the row, by another, or, if the row is new, by anybody for who appends it; the last two
// wait for its slot (`follow`). Until its row is moved or waited for, an entry of any but a block's
// first tile lies packed where its answer will be.
#pragma once
#include "append.cuh"
#include "landing.cuh"

constexpr u32 WIDE_THREADS = 2 * RECALL_THREADS;  // of a block that has its SM for itself
constexpr u32 SCORES_HELD = 4;    // of a row's scores, how many a thread asks for at once
constexpr u32 LATE = 1u << 27;    // a place in the ready list that means "another's claim",
constexpr u32 NEW = LATE + 1;     // and one that means "a new row's"
constexpr u32 STRETCHES = WARP;   // of the host pool: a block moves its rows stretch by stretch
constexpr u32 FEW_ROWS = 2;       // of a block: they are sent for before the grid has looked

template <u32 THREADS>
struct RecallShared {
  u32 low[THREADS / WARP], high[THREADS / WARP];
  u32 hits, touched, recalled, evicted, allocated;
  u32 place;  // in the ready list, of the first of a tile's claims
  u32 pad[2];
  u32 claims[STRETCHES];    // rows that the block's entries of a tile have claimed, by stretch
  i32 host_slots[THREADS];  // of those rows, and where they go
  i32 device_slots[THREADS];
};
static_assert(sizeof(RecallShared<WIDE_THREADS>) ==
                  4 * (2 * WIDE_THREADS / WARP + 8 + STRETCHES + 2 * WIDE_THREADS),
              "recall.py");

struct ResidentArguments {
  Layer layer;
  NewRows new_rows;       // what the last block appends, if there are any
  const i32* host_slots;  // [rows, k]
  const float* scores;    // [rows, k]
  i32* device_slots;      // [rows, k] out
  i32 k;
  i32 tiles;          // rows * tiles_per_row
  i32 tiles_per_row;  // a tile is what a block looks at at once, of one row
  i32 lanes;          // entries of a warp
  i32 movers;         // warps of a block that move rows, if they are few
  i32 words_of_16;    // whether both pools' rows are made of them
  u32 stretch;        // host slots of one
  u32 landings;       // byte of shared memory at which FEW_ROWS land; 0: none do
};

// Priorities of a row's entries: the step, then the place of a score within the row's range.
struct Range {
  float low, high;
};

struct Extremes {
  u32 low, high;
};

// This thread's share of a row: all of it in flight at once.
template <u32 THREADS>
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

template <u32 THREADS>
DEVICE Range range_of_row(Extremes mine, RecallShared<THREADS>* shared, u32 thread) {
  constexpr u32 WARPS = THREADS / WARP;
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
  bool mine;      // and claimed here,
  bool appended;  // or a new row
  Victim victim;  // who leaves for it, when mine
};

// Entries of later tiles wait in device_slots, where their results will be.
DEVICE i32 pack(u32 place, i32 level, i32 floor) {
  return -2 - i32(place << SCORE_BITS | u32(level - floor));
}

template <u32 THREADS>
DEVICE Entry entry_of(const ResidentArguments& a, u32 tile, u32 thread) {
  const u32 row = tile / a.tiles_per_row, part = tile % a.tiles_per_row, lane = thread % WARP;
  const u32 column = (part * (THREADS / WARP) + thread / WARP) * a.lanes + lane;
  Entry entry = {};
  entry.host_slot = entry.victim.slot = entry.victim.owner = NONE;
  entry.index = ALL_LANES;
  if (lane < u32(a.lanes) && column < u32(a.k)) {
    entry.index = row * a.k + column;
    entry.host_slot = a.host_slots[entry.index];
  }
  return entry;
}

template <u32 THREADS>
DEVICE Entry unpack(const ResidentArguments& a, const ReadyList& list, u32 tile, u32 thread,
                    i32 floor) {
  Entry entry = entry_of<THREADS>(a, tile, thread);
  if (entry.host_slot < 0) return entry;
  const i32 state = a.device_slots[entry.index];
  entry.missing = state < NONE;
  if (entry.missing) {
    const u32 packed = u32(-2 - state), place = packed >> SCORE_BITS;
    entry.level = floor + i32(packed & SCORE_LEVELS);
    entry.mine = place < LATE;
    entry.appended = place == NEW;
    if (entry.mine) entry.victim = name_victim(a.layer, list, place);
  }
  return entry;
}

// New rows' host slots, two a lane.
struct NewSlots {
  i32 first, second;
};

DEVICE NewSlots load_new_slots(const ResidentArguments& a, u32 lane) {
  const u32 count = a.new_rows.count;
  return {lane < count ? a.new_rows.host_slots[lane] : NONE,
          lane + WARP < count ? a.new_rows.host_slots[lane + WARP] : NONE};
}

DEVICE bool is_new(const ResidentArguments& a, const NewSlots& slots, i32 host_slot) {
  bool found = false;
  for (u32 i = 0; i < u32(a.new_rows.count); i++)
    found |= __shfl_sync(ALL_LANES, i < WARP ? slots.first : slots.second, i % WARP) == host_slot;
  return found;
}

// Claim an entry that is absent; a new row for who appends it, who may have given it a slot by now.
DEVICE void claim_entry(const ResidentArguments& a, Entry* entry, i32 found,
                        const NewSlots& new_slots) {
  entry->missing = entry->host_slot >= 0 && found < 0;
  if (__ballot_sync(ALL_LANES, entry->missing) == 0) return;
  entry->appended = is_new(a, new_slots, entry->host_slot) && entry->missing;
  entry->mine = entry->missing && claim(a.layer, entry->host_slot) && !entry->appended;
}

// Protect an entry that was found.
template <u32 THREADS>
DEVICE void protect(const ResidentArguments& a, const Entry& entry, i32 found, i32 floor, i32 used,
                    RecallShared<THREADS>* shared, u32 lane) {
  i32 before = floor + 1;  // its priority; -1: of a slot that a new row has just taken
  if (found >= 0) before = atomicMax(a.layer.priority + found, entry.level);
  const u32 hits = __ballot_sync(ALL_LANES, before <= floor);
  const u32 touched = __ballot_sync(ALL_LANES, before >= 0 && before < used);
  if (lane != 0) return;
  if (hits != 0) atomicAdd(&shared->hits, __popc(hits));
  if (touched != 0) atomicAdd(&shared->touched, __popc(touched));
}

// Places in the ready list for what the warp claimed.
DEVICE void take_places(const ResidentArguments& a, Entry* entry, u32 claimed, u32 lane) {
  if (claimed == 0) return;
  u32 base = 0;
  if (lane == 0) base = take_names(a.layer, __popc(claimed));
  base = __shfl_sync(ALL_LANES, base, 0);
  entry->victim.place = base + __popc(claimed & ((1u << lane) - 1));
}

// Wait for a row that another has claimed, and raise its priority. Whoever raises a new row's first
// counts it as found. (A claimed row's owner has counted it; its own raise may come later.)
DEVICE void follow(const ResidentArguments& a, const Entry& entry, i32 floor, u32 lane) {
  i32 before = floor + 1;
  if (entry.missing && !entry.mine) {
    const i32 slot = await_claim(a.layer, entry.host_slot);
    if (slot >= 0) before = atomicMax(a.layer.priority + slot, entry.level);
    a.device_slots[entry.index] = slot;
  }
  const u32 hits = __ballot_sync(ALL_LANES, entry.appended && before <= floor);
  if (lane == 0) add_total(a.layer.totals, HITS, __popc(hits));
}

DEVICE void say_where(const ResidentArguments& a, const Entry& entry, i32 found) {
  if (entry.index != ALL_LANES && !entry.missing)
    a.device_slots[entry.index] = entry.host_slot >= 0 ? found : NONE;
}
