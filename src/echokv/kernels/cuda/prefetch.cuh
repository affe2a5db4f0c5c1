// Fetching rows that beat a prediction, beside what makes their scores or selects among them.
//
//   scoring warps --candidates--> lists, in device memory --> fetching warps --claims--> device pool
//
// A candidate is a position whose score is at least the row's predicted k-th score. Each warp of
// `index_scores` that makes scores puts its candidates on a list of its own, without an atomic. A
// block of `fetch_listed`, a launch on another stream that shares the SMs with the scores and then
// with the top-k, reads a list of each of some scoring blocks. Nobody who scores waits: a list that is
// full forgets a candidate, which costs a later recall and nothing else. An entry is written whole,
// and carries the epoch of the launch, so that nothing need be emptied: what another launch has left
// is of another epoch. After its last page a warp puts an END for each thread that reads its list.
//
// A fetching warp drops candidates that are resident, and asks the row's budget for the others:
// `counts` is raised, and lowered again where that exceeds the budget, so that it ends at what was
// granted and no grant is made twice. It takes a name off the ready list, of a slot that is free,
// claims the row and publishes the mapping by the protocol of claims.cuh, at the floor (protected in
// this step, below whatever is selected in it), notes that it was fetched, and copies the row. Nobody
// reads device rows before the kernel is over, so the mapping may be published before the row has
// landed, and the selection be made resident meanwhile: no row leaves for one that is fetched.
//
// - No slot is lost to a budget that has run out: nothing is claimed before its budget is granted.
// - Rows that requests share are claimed once; the others see the claim, or the mapping, and pass.
// - Where no slot is free any more, a warp leaves; what it has claimed nothing for is recalled, like
//   every row that no prediction named.
// - Once the row's k-th score is known nothing more is claimed for it: what is selected will be
//   recalled, and needn't wait for what isn't.
// - Nobody waits without end: where nothing comes for PATIENCE, because the scores are late or were
//   made before, a fetching warp leaves.
#pragma once
#include "claims.cuh"
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
constexpr u32 WORDS_IN_FLIGHT = 3;  // of sixteen bytes, a lane

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

// A place among a row's candidates, within its budget; at least `most` where there is none. Whole warps.
DEVICE u32 ask_budget(const PrefetchArguments& a, const Contexts& contexts, u32 row, u32 lane) {
  u32 place = a.most;
  if (lane == 0) {
    const u32 before = u32(atomicAdd(a.counts + row, 1));
    if (before < budget_of(a, contexts, row))
      place = before;
    else
      atomicAdd(a.counts + row, -1);
  }
  return __shfl_sync(ALL_LANES, place, 0);
}

// A part of a row: what a warp asks for at once.
struct RowPart {
  Words words[WORDS_IN_FLIGHT];
};
constexpr u32 PART_BYTES = WORDS_IN_FLIGHT * WARP * 16;

DEVICE RowPart load_part(const u8* from, u32 bytes, u32 lane) {
  RowPart part;
#pragma unroll
  for (u32 i = 0; i < WORDS_IN_FLIGHT; i++)
    if ((i * WARP + lane) * 16 < bytes) part.words[i] = load_row_words(from + (i * WARP + lane) * 16);
  return part;
}

DEVICE void store_part(u8* to, const RowPart& part, u32 bytes, u32 lane) {
#pragma unroll
  for (u32 i = 0; i < WORDS_IN_FLIGHT; i++)
    if ((i * WARP + lane) * 16 < bytes) store_row_words(to + (i * WARP + lane) * 16, part.words[i]);
}

// The rest of a row, whose first part is there, and all of it to its device slot.
DEVICE void store_row(const Layer& layer, const RowPart& first, i32 host_slot, i32 slot, u32 lane) {
  const u32 row_bytes = layer.row_bytes;
  const u8* from = host_row(layer, host_slot);
  u8* to = device_row(layer, slot);
  store_part(to, first, row_bytes, lane);
  for (u32 at = PART_BYTES; at < row_bytes; at += PART_BYTES)
    store_part(to + at, load_part(from + at, row_bytes - at, lane), row_bytes - at, lane);
}

struct Fetched {
  u32 rows, evicted;
};

DEVICE void add_fetched(const PrefetchArguments& a, const Fetched& fetched, u32 lane) {
  if (lane != 0) return;
  add_total(a.layer.totals, RECALLED, fetched.rows);
  add_total(a.layer.totals, EVICTED, fetched.evicted);
  add_total(a.layer.totals, ALLOCATED, fetched.rows);
}

// Fetch a row if it is still absent, into a free slot only: a recall beside counts on what it finds.
// `at` is where it is on the lists. False: no slot is free any more. Whole warps.
DEVICE bool take_in_free(const PrefetchArguments& a, i32 host_slot, u32 at, i32 floor,
                         Fetched* fetched, u32 lane) {
  const Layer& layer = a.layer;
  bool room = false;
  i32 slot = NONE;  // that it goes to
  if (lane == 0) {
    const Victim victim = name_victim(layer, ready_list(layer, floor), take_names(layer, 1));
    room = is_free(victim);
    if (room && claim(layer, host_slot)) {
      slot = victim.slot;
      layer.device_to_host[slot] = host_slot;
      layer.device_free[slot] = 0;
      store_shared_value(layer.priority + slot, floor);
      a.host_slots[at] = host_slot;
      device_fence();  // whoever sees the mapping sees the priority: then it is a hit
      store_shared_value(layer.host_to_device + host_slot, slot);
    }
  }
  slot = __shfl_sync(ALL_LANES, slot, 0);
  if (slot >= 0) {
    fetched->rows++;
    const RowPart part = load_part(host_row(layer, host_slot), layer.row_bytes, lane);
    store_row(layer, part, host_slot, slot, lane);
  }
  return __any_sync(ALL_LANES, room);
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

// Fetch those of the lanes' candidates that are absent, as far as budgets go and until the rows'
// selections are known. One after the other: a few hundred rows on their way are all that PCIe needs.
// False: no slot is free any more.
DEVICE bool fetch_found(const ListedArguments& a, const Candidate& candidate, i32 floor,
                        Fetched* fetched, u32 lane) {
  const PrefetchArguments& to = a.prefetch;
  bool waits = false;
  if (candidate.valid) {  // all three are asked for at once
    const bool open = is_open(a, candidate.row);
    const i32 found = load_shared_value(to.layer.host_to_device + candidate.host_slot);
    const u32 count = u32(load_shared_value(to.counts + candidate.row));
    waits = open && found < 0 && count < budget_of(to, a.contexts, candidate.row);
  }
  for (u32 left = __ballot_sync(ALL_LANES, waits); left != 0;) {
    const u32 next = __ffs(left) - 1, row = __shfl_sync(ALL_LANES, candidate.row, next);
    left &= left - 1;
    const u32 place = ask_budget(to, a.contexts, row, lane);
    if (place >= to.most) {
      left &= ~__ballot_sync(ALL_LANES, candidate.row == row);
      continue;
    }
    const u32 at = row * to.most + place;
    if (lane == next) to.scores[at] = candidate.score;
    const i32 host_slot = __shfl_sync(ALL_LANES, candidate.host_slot, next);
    if (!take_in_free(to, host_slot, at, floor, fetched, lane)) return false;
    left &= __ballot_sync(ALL_LANES, (left >> lane & 1) && is_open(a, candidate.row));
  }
  return true;
}

// A thread of a block that fetches what scoring blocks list, one list of each: a request that misses
// many rows at once is scored by few blocks, and then as many fetch them as a block has lists.
DEVICE void fetch_list(const ListedArguments& a, u32 thread) {
  const u32 lane = thread % WARP, epoch = *a.epoch;
  // Neighbours read neighbouring entries of one list.
  const u32 readers = LISTED_THREADS / a.num_lists, number = thread / readers;
  const u32 scoring = (block_index() + number) % grid_size();
  const Listed* list = a.lists + u64(scoring * a.num_lists + number) * LIST;
  const i32 floor = *a.prefetch.layer.floor;
  Fetched fetched = {0, 0};
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
      if (!fetch_found(a, candidate, floor, &fetched, lane)) break;
      since = nanoseconds();
      continue;
    }
    if (__all_sync(ALL_LANES, over || nanoseconds() - since > PATIENCE)) break;
    pause();
  }
  add_fetched(a.prefetch, fetched, lane);
}
