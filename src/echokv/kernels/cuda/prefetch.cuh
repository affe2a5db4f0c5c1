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
// A fetching warp drops candidates that are resident, and fetches the others two at a time, one with
// each half of its lanes: most of what a claim takes is waiting. A half asks the row's budget: `counts`
// is raised, and lowered again where that exceeds the budget, so that it ends at what was granted and
// no grant is made twice. It takes a name off the ready list, of a slot that is free, claims the row
// and publishes the mapping by the protocol of claims.cuh, at the floor (protected in this step, below
// whatever is selected in it), notes that it was fetched, and copies the row. Nobody reads device rows
// before the kernel is over, so the mapping may be published before the row has landed, and the
// selection be made resident meanwhile: no row leaves for one that is fetched.
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

// What a lane has in hand, or half a warp.
struct Candidate {
  bool valid;
  i32 host_slot;
  float score;
  u32 row;
};

// A place among a row's candidates, within its budget; at least `most` where there is none.
DEVICE u32 ask_budget(const PrefetchArguments& a, const Contexts& contexts, u32 row) {
  const u32 before = u32(atomicAdd(a.counts + row, 1));
  if (before < budget_of(a, contexts, row)) return before;
  atomicAdd(a.counts + row, -1);
  return a.most;
}

// A part of a row: what some lanes ask for at once, so many times sixteen bytes each.
template <u32 LANES_OF_IT, u32 WORDS_OF_LANE>
struct RowPart {
  static constexpr u32 LANES = LANES_OF_IT, WORDS = WORDS_OF_LANE, BYTES = LANES * WORDS * 16;
  Words words[WORDS];
};

template <typename Part>
DEVICE Part load_part(const u8* from, u32 bytes, u32 lane) {
  Part part;
#pragma unroll
  for (u32 i = 0; i < Part::WORDS; i++) {
    const u32 at = (i * Part::LANES + lane) * 16;
    if (at < bytes) part.words[i] = load_row_words(from + at);
  }
  return part;
}

template <typename Part>
DEVICE void store_part(u8* to, const Part& part, u32 bytes, u32 lane) {
#pragma unroll
  for (u32 i = 0; i < Part::WORDS; i++) {
    const u32 at = (i * Part::LANES + lane) * 16;
    if (at < bytes) store_row_words(to + at, part.words[i]);
  }
}

// The rest of a row, whose first part is there, and all of it to its device slot.
template <typename Part>
DEVICE void store_row(const Layer& layer, const Part& first, i32 host_slot, i32 slot, u32 lane) {
  const u32 row_bytes = layer.row_bytes;
  const u8* from = host_row(layer, host_slot);
  u8* to = device_row(layer, slot);
  store_part(to, first, row_bytes, lane);
  for (u32 at = Part::BYTES; at < row_bytes; at += Part::BYTES) {
    const Part part = load_part<Part>(from + at, row_bytes - at, lane);
    store_part(to + at, part, row_bytes - at, lane);
  }
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

// A free slot for a row that is still absent, which it has from then on; NONE where there is none, or
// the row isn't absent. Only free ones: a recall beside counts on what it finds. `at` is where the row is
// on the lists. `room`: whether a slot was free.
DEVICE i32 claim_free(const PrefetchArguments& a, i32 host_slot, u32 at, i32 floor, bool* room) {
  const Layer& layer = a.layer;
  const Victim victim = name_victim(layer, ready_list(layer, floor), take_names(layer, 1));
  *room = is_free(victim);
  if (!*room || !claim(layer, host_slot)) return NONE;
  layer.device_to_host[victim.slot] = host_slot;
  layer.device_free[victim.slot] = 0;
  store_shared_value(layer.priority + victim.slot, floor);
  a.host_slots[at] = host_slot;
  device_fence();  // whoever sees the mapping sees the priority: then it is a hit
  store_shared_value(layer.host_to_device + host_slot, victim.slot);
  return victim.slot;
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

// Whether a candidate is to be fetched, as far as can be seen; all that tells is asked for at once.
DEVICE bool is_wanted(const ListedArguments& a, const Candidate& candidate) {
  const PrefetchArguments& to = a.prefetch;
  const bool open = is_open(a, candidate.row);
  const i32 found = load_shared_value(to.layer.host_to_device + candidate.host_slot);
  const u32 count = u32(load_shared_value(to.counts + candidate.row));
  return open && found == NONE && count < budget_of(to, a.contexts, candidate.row);
}

// Half a warp fetches a row. More on their way at once would not come sooner, and slow the scores.
constexpr u32 TEAM = WARP / 2, TEAMS = WARP / TEAM;
using TeamPart = RowPart<TEAM, 5>;  // all of 1,152 bytes

// Fetch each team's candidate. False: no slot is free any more. Whole warps.
DEVICE bool fetch_rows(const ListedArguments& a, const Candidate& candidate, i32 floor,
                       Fetched* fetched, u32 lane) {
  const PrefetchArguments& to = a.prefetch;
  bool room = true;
  i32 slot = NONE;  // that a row goes to
  if (lane % TEAM == 0 && candidate.valid) {
    const u32 place = ask_budget(to, a.contexts, candidate.row);
    if (place < to.most) {
      const u32 at = candidate.row * to.most + place;
      to.scores[at] = candidate.score;
      slot = claim_free(to, candidate.host_slot, at, floor, &room);
    }
  }
  fetched->rows += __popc(__ballot_sync(ALL_LANES, slot >= 0));
  slot = __shfl_sync(ALL_LANES, slot, lane / TEAM * TEAM);
  if (slot >= 0) {
    const u8* from = host_row(to.layer, candidate.host_slot);
    const TeamPart part = load_part<TeamPart>(from, to.layer.row_bytes, lane % TEAM);
    store_row(to.layer, part, candidate.host_slot, slot, lane % TEAM);
  }
  return __all_sync(ALL_LANES, room);
}

// Fetch those of the lanes' candidates that are absent, as far as budgets go and until the rows'
// selections are known. False: no slot is free any more.
DEVICE bool fetch_found(const ListedArguments& a, const Candidate& candidate, i32 floor,
                        Fetched* fetched, u32 lane) {
  bool waits = candidate.valid && is_wanted(a, candidate);
  for (u32 left; (left = __ballot_sync(ALL_LANES, waits)) != 0;) {
    u32 mine = left;  // whose first is this team's
    for (u32 team = 0; team < TEAMS; team++, left &= left - 1)
      if (team < lane / TEAM) mine &= mine - 1;
    const u32 next = mine != 0 ? __ffs(mine) - 1 : lane;
    const Candidate taken = {mine != 0, __shfl_sync(ALL_LANES, candidate.host_slot, next),
                             bits_float(__shfl_sync(ALL_LANES, float_bits(candidate.score), next)),
                             __shfl_sync(ALL_LANES, candidate.row, next)};
    if (!fetch_rows(a, taken, floor, fetched, lane)) return false;
    waits = (left >> lane & 1) != 0 && is_wanted(a, candidate);
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
