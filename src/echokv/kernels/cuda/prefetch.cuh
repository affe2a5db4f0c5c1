// Fetching rows that beat a prediction, beside what makes their scores or selects among them.
//
//   scoring warps --candidates--> lists, in device memory --> fetching warps --claims--> device pool
//
// A candidate is a position whose score is at least the row's predicted k-th score. Each warp of
// `index_scores` that makes scores puts its candidates on a list of its own, without an atomic. Block
// b of `fetch_listed`, a launch on another stream that shares the SMs with the scores and then with
// the top-k, reads the lists of scoring block b. Nobody who scores waits: a list that is full forgets
// a candidate, which costs a later recall and nothing else. An entry is written whole, and carries
// the epoch of the launch, so that nothing need be emptied: what another launch has left is of
// another epoch. After its last page a warp puts an END for each thread that reads its list.
//
// A fetching warp drops candidates that are resident, and asks the row's budget for the others:
// `counts` is raised by as many, and what exceeds the budget is given back, so that it ends at what
// was granted and no grant is made twice. It claims a row, takes a victim and publishes the mapping
// by the protocol of claims.cuh, at the floor (protected in this step, below whatever is selected in
// it), notes that it was fetched, and copies the row. Nobody reads device rows before the kernel is
// over, so the mapping may be published before the row has landed.
//
// - No slot is lost to a budget that has run out: nothing is claimed before its budget is granted.
// - Rows that requests share are claimed once; the others see the claim, or the mapping, and pass.
// - A victim may be a candidate that was seen as resident: then it is recalled after the top-k,
//   like every row that no prediction named.
// - Once the row's k-th score is known nothing more is claimed for it: what is selected will be
//   recalled, and needn't wait for what isn't.
// - Nobody waits without end: where nothing comes for PATIENCE, because the scores are late or were
//   made before, a fetching warp leaves.
#pragma once
#include "claims.cuh"
#include "landing.cuh"
#include "schedule.cuh"

#ifndef LIST_ENTRIES
#define LIST_ENTRIES 128
#endif
constexpr u32 LIST = LIST_ENTRIES;  // of a scoring warp
constexpr i32 END = -3;  // instead of a host slot: nothing will follow
constexpr u32 UNKNOWN = 0x7fc0dead;  // a k-th score that isn't there yet; no score is this NaN
constexpr u64 PATIENCE = 1000000;    // nanoseconds
#ifndef LISTED_THREADS
#define LISTED_THREADS 128
#endif
constexpr u32 BUDGET_UNIT = 1u << 16;
#ifndef FLYING
#define FLYING 2
#endif
constexpr i32 MOST_FLYING = FLYING;
#ifndef CLAIMS
#define CLAIMS 4
#endif
constexpr u32 CLAIMS_AT_ONCE = CLAIMS;
constexpr u32 TRIES = 16;

// An entry of a scoring block's list.
struct alignas(16) Listed {
  i32 host_slot;  // or END
  float score;
  u32 row;
  u32 epoch;
};

struct PrefetchArguments {
  Layer layer;               // whose totals count what is prefetched
  const i32* request_slots;  // [rows], entries of thresholds and limits; -1: none
  const float* thresholds;   // [slots], predicted k-th scores
  const i32* limits;         // [slots], most rows of each
  i32* counts;               // [rows], candidates within the budget; 0 at first
  i32* host_slots;           // [rows, most], those that were fetched; -1 at first
  float* scores;             // [rows, most], of all candidates within the budget; -inf at first
  u32 most;
  u32 rows_per_unit;
  u32 least;
  u32 rows;
};

// The score that a row's candidates must reach; NaN, which nothing does, where there is none.
DEVICE float threshold_of(const i32* request_slots, const float* thresholds, u32 row) {
  const i32 slot = request_slots[row];
  const float threshold = slot < 0 ? bits_float(0x7fc00000u) : thresholds[slot];
  return threshold < bits_float(0x7f800000u) ? threshold : bits_float(0x7fc00000u);
}

DEVICE u32 budget_of(const PrefetchArguments& a, const Contexts& contexts, u32 row) {
  const i32 limit = a.limits[a.request_slots[row]];
  const u32 most = limit < 0 ? 0 : smaller(limit, a.most);
  const u64 by_length = u64(tokens_of(contexts, row)) * a.rows_per_unit / BUDGET_UNIT;
  return by_length + a.least < most ? u32(by_length) + a.least : most;
}

// What one lane has in hand.
struct Candidate {
  bool valid;
  i32 host_slot;
  float score;
  u32 row;
};

// A place among the row's candidates; `most`: it has no budget left. One thread.
DEVICE u32 ask_budget(const PrefetchArguments& a, const Contexts& contexts, u32 row) {
  const u32 before = u32(atomicAdd(a.counts + row, 1));
  if (before < budget_of(a, contexts, row)) return before;
  atomicAdd(a.counts + row, -1);
  return a.most;
}

// One warp's fetching.
struct Fetching {
  i32* flying;  // rows of the block that are on their way,
  i32 most;     // and how many may be
  Landing landing;
  u32 rows, evicted;  // of the first lane
};

// Bytes of shared memory that so many fetching warps want, from a multiple of LINE on.
DEVICE constexpr u32 fetching_bytes(u32 warps, u32 row_bytes) {
  return LINE + warps * landing_bytes(row_bytes);
}

// Before the first of them begins.
DEVICE void make_fetching(u8* shared) { *reinterpret_cast<i32*>(shared) = 0; }

DEVICE Fetching begin_fetching(u8* shared, const Layer& layer, i32 most, u32 warp, u32 lane) {
  i32* flying = reinterpret_cast<i32*>(shared);
  return {flying, most, make_landing(shared + LINE, layer.row_bytes, warp, lane), 0, 0};
}

DEVICE void end_fetching(const Layer& layer, const Fetching& fetching, u32 lane) {
  if (lane != 0) return;
  add_total(layer.totals, RECALLED, fetching.rows);
  add_total(layer.totals, EVICTED, fetching.evicted);
  add_total(layer.totals, ALLOCATED, fetching.rows);
}

// Wait until few enough rows of the block are on their way. `over`: what is late, by lane, as of
// when it was last asked; false: lane `next` is.
template <typename Late>
DEVICE bool take_off(const Fetching& fetching, u32 next, u32* over, u32 lane, Late late) {
  while ((*over >> next & 1) == 0) {
    for (u32 i = 0; i < TRIES; i++) {
      bool may = false;
      if (lane == 0) {
        const i32 now = i32(load_from_block(reinterpret_cast<u32*>(fetching.flying)));
        may = now < fetching.most && atomicCAS(fetching.flying, now, now + 1) == now;
      }
      if (__any_sync(ALL_LANES, may)) return true;
    }
    *over = __ballot_sync(ALL_LANES, late());
  }
  return false;
}

// Give a row that is on its way a device slot. The first lane's work; the slot, or -1, is all's.
DEVICE i32 settle_prefetched(const PrefetchArguments& a, i32 host_slot, u32 at, i32 floor,
                             Fetching* fetching, u32 lane) {
  i32 slot = NONE;
  if (lane == 0) {
    Victim victim = name_victim(a.layer, take_names(a.layer, 1));
    if (settle(a.layer, &victim, host_slot, floor, floor)) {
      a.host_slots[at] = host_slot;
      fetching->rows++;
      fetching->evicted += victim.owner >= 0;
      slot = victim.slot;
    }
  }
  return __shfl_sync(ALL_LANES, slot, 0);
}

// Fetch the rows that lanes have claimed, one after the other, each to be noted at `at`. What is
// `late` before it is sent for is given up.
template <typename Late>
DEVICE void fetch_claimed(const PrefetchArguments& a, bool mine, i32 host_slot, u32 at, i32 floor,
                          Fetching* fetching, u32 lane, Late late) {
  const Layer& layer = a.layer;
  u32 over = 0;
  for (u32 left = __ballot_sync(ALL_LANES, mine); left != 0; left &= left - 1) {
    const u32 next = __ffs(left) - 1;
    const i32 row = __shfl_sync(ALL_LANES, host_slot, next);
    if (!take_off(*fetching, next, &over, lane, late)) {
      if (lane == next) store_shared_value(layer.host_to_device + host_slot, NONE);
      continue;
    }
    send_for_row(&fetching->landing, host_row(layer, row), layer.row_bytes, lane);
    // Meanwhile, where it goes, and whether the others are still wanted.
    const bool is_late = late();
    const i32 slot = settle_prefetched(a, row, __shfl_sync(ALL_LANES, at, next), floor, fetching,
                                       lane);
    over = __ballot_sync(ALL_LANES, is_late);
    const u8* from = await_row(fetching->landing);
    if (lane == 0) atomicAdd(fetching->flying, -1);
    if (slot < 0) continue;
    u8* to = device_row(layer, slot);
    for (u32 byte = lane * 16; byte < u32(layer.row_bytes); byte += WARP * 16)
      store_row_words(to + byte, load_words(from + byte));
  }
}

// List the lanes' candidates; all of a scoring warp, whose count is in shared memory.
DEVICE void list_candidates(Listed* list, u32* count, bool candidate, i32 host_slot, float score,
                            u32 row, u32 epoch, u32 lane) {
  const u32 chosen = __ballot_sync(ALL_LANES, candidate);
  if (chosen == 0) return;
  const u32 before = *count, at = before + __popc(chosen & ((1u << lane) - 1));
  warp_sync();
  if (lane == 0) *count = before + __popc(chosen);
  warp_sync();
  if (candidate && at < LIST) store_whole(list + at, {u32(host_slot), float_bits(score), row, epoch});
}

// After a warp's last candidate: an END for each of the threads that read its list.
DEVICE void end_list(Listed* list, u32 count, u32 readers, u32 epoch, u32 lane) {
  for (u32 at = count + lane; at < count + readers && at < LIST; at += WARP)
    store_whole(list + at, {u32(END), 0, 0, epoch});
}

struct ListedArguments {
  PrefetchArguments prefetch;
  Contexts contexts;
  const Listed* lists;  // [blocks, lists, LIST]
  const u32* epoch;     // [1]
  const i32* kth;       // [rows], bits of the true k-th scores; UNKNOWN until they are known
  u32 num_lists;        // of a scoring block; divides the threads of one that fetches
  u32 pad;
};

// Whether a row's selection isn't known yet.
DEVICE bool is_open(const ListedArguments& a, u32 row) {
  return u32(load_shared_value(a.kth + row)) == UNKNOWN;
}

// Fetch those of the lanes' candidates that are absent, a few at a time, as far as budgets go and
// until the rows' selections are known. Budgets are asked for by a few at a time too, so that
// whoever comes first doesn't take for a long queue of its own what others could fetch at once.
DEVICE void fetch_found(const ListedArguments& a, const Candidate& candidate, i32 floor,
                        Fetching* fetching, u32 lane) {
  const PrefetchArguments& to = a.prefetch;
  const auto late = [&] { return candidate.valid && !is_open(a, candidate.row); };
  bool waits = candidate.valid && is_open(a, candidate.row);
  if (waits) waits = load_shared_value(to.layer.host_to_device + candidate.host_slot) < 0;
  for (u32 left = __ballot_sync(ALL_LANES, waits); left != 0;) {
    const bool asks = (left >> lane & 1) && __popc(left & ((1u << lane) - 1)) < CLAIMS_AT_ONCE;
    const bool open = asks && is_open(a, candidate.row);
    u32 place = to.most;
    if (asks) place = ask_budget(to, a.contexts, candidate.row);
    const u32 at = candidate.row * to.most + place;
    if (place < to.most) to.scores[at] = candidate.score;
    const bool granted = open && place < to.most;
    left &= ~__ballot_sync(ALL_LANES, asks);
    for (u32 refused = __ballot_sync(ALL_LANES, asks && !granted); refused != 0;) {
      const u32 row = __shfl_sync(ALL_LANES, candidate.row, __ffs(refused) - 1);
      left &= ~__ballot_sync(ALL_LANES, candidate.row == row);
      refused &= refused - 1;
    }
    fetch_claimed(to, granted && claim(to.layer, candidate.host_slot), candidate.host_slot, at,
                  floor, fetching, lane, late);
  }
}

// Bring the lines that taking the next names in will look at into the L2 cache: one a thread.
DEVICE void fetch_names_ahead(const Layer& layer, u32 index) {
  const u32 place = u32(load_shared_value(layer.cursor + TAKEN)) + index;
  if (place >= u32(layer.cursor[LISTED])) return;
  const i32 slot = layer.ready[place];
  fetch_line(layer.device_to_host + slot);
  fetch_line(layer.priority + slot);
}

// A thread of a block that fetches what the scoring block of the same number lists.
DEVICE void fetch_list(const ListedArguments& a, u8* shared, u32 thread) {
  const u32 lane = thread % WARP, epoch = *a.epoch;
  const PrefetchArguments& to = a.prefetch;
  const u32 index = block_index() * LISTED_THREADS + thread;
  if (index < to.rows * to.most) fetch_names_ahead(to.layer, index);
  // Neighbours read neighbouring entries of one list.
  const u32 readers = LISTED_THREADS / a.num_lists;
  const Listed* list = a.lists + u64(block_index() * a.num_lists + thread / readers) * LIST;
  const i32 floor = *to.layer.floor;
  Fetching fetching = begin_fetching(shared, to.layer, MOST_FLYING, thread / WARP, lane);
  u32 place = thread % readers;
  bool over = false;
  for (u64 since = nanoseconds();;) {
    Words entry = {0, 0, 0, epoch + 1};
    if (!over) entry = load_whole(list + place);
    const bool seen = entry.w == epoch;
    const bool found = seen && i32(entry.x) != END;
    if (seen) place += readers;
    over = over || seen != found || place >= LIST;
    if (__any_sync(ALL_LANES, found)) {
      const Candidate candidate = {found, i32(entry.x), bits_float(entry.y), found ? entry.z : 0};
      fetch_found(a, candidate, floor, &fetching, lane);
      since = nanoseconds();
      continue;
    }
    if (__all_sync(ALL_LANES, over || nanoseconds() - since > PATIENCE)) break;
    pause();
  }
  end_fetching(to.layer, fetching, lane);
}
