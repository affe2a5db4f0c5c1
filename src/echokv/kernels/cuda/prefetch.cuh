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
// A fetching warp drops candidates that are resident, and asks for the others, a few at a time:
// `counts` of its row is raised, and lowered again where that exceeds the budget, so that it ends at
// what was granted and no grant is made twice. It claims the row, sends for it, takes a victim and
// publishes the mapping by the protocol of claims.cuh, inside the layer's gate, at the floor
// (protected in this step, below whatever is selected in it), and notes that it was fetched.
// `make_resident` may begin before the kernel is over; attention, which reads rows, may not.
//
// - No slot is lost to a budget that has run out: nothing is claimed before its budget is granted.
// - Rows that requests share are claimed once; the others see the claim, or the mapping, and pass.
// - A victim may be a candidate that was seen as resident: then it is recalled after the top-k,
//   like every row that no prediction named.
// - Once the row's k-th score is known nothing more is claimed for it: what is selected will be
//   recalled, and needn't wait for what isn't. Nor when the gate is closed.
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
// Rows that a warp claims before it looks again whether it should.
constexpr u32 CLAIMS_AT_ONCE = 2;

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

enum Answer {
  GRANTED,  // and claimed
  LOST,     // to another's claim
  REFUSED,  // the row has no budget left
  SHUT,     // the gate is closed
};

// Ask for a candidate; when it is granted, the thread is inside the gate and `at` its place.
DEVICE Answer ask_for(const PrefetchArguments& a, const Contexts& contexts,
                      const Candidate& candidate, u32* at) {
  i32* count = a.counts + candidate.row;
  const bool open = go_in(a.layer.gate);
  const u32 place = u32(atomicAdd(count, 1));
  const bool granted = place < budget_of(a, contexts, candidate.row);
  if (open && granted) {
    *at = candidate.row * a.most + place;
    a.scores[*at] = candidate.score;
    if (claim(a.layer, candidate.host_slot)) return GRANTED;
  } else {
    atomicAdd(count, -1);
  }
  go_out(a.layer.gate);
  return !open ? SHUT : granted ? LOST : REFUSED;
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

// Give the row that this lane has claimed a device slot, and go out of the gate: the slot, or -1.
DEVICE i32 settle_claim(const PrefetchArguments& a, const ReadyList& list, bool mine,
                        i32 host_slot, u32 at, i32 floor, Fetched* fetched) {
  const Layer& layer = a.layer;
  Victim victim = {0, NONE, NONE};
  bool settled = false;
  if (mine) {
    victim = name_victim(layer, list, take_names(layer, 1));
    settled = settle(layer, list, &victim, host_slot, floor);
    if (settled) a.host_slots[at] = host_slot;
    go_out(layer.gate);
  }
  fetched->rows += __popc(__ballot_sync(ALL_LANES, settled));
  fetched->evicted += __popc(__ballot_sync(ALL_LANES, settled && victim.owner >= 0));
  return victim.slot;
}

// Put the row that has been sent for where it belongs.
DEVICE void land_row(const Layer& layer, const Landing& landing, i32 slot, u32 lane) {
  const u8* from = await_row(landing);
  if (slot < 0) return;
  u8* to = device_row(layer, slot);
  for (u32 at = lane * 16; at < u32(layer.row_bytes); at += WARP * 16)
    store_row_words(to + at, load_words(from + at));
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
// until the rows' selections are known. False: nothing more is to be fetched at all.
DEVICE bool fetch_found(const ListedArguments& a, const ReadyList& list,
                        const Candidate& candidate, i32 floor,
                        Landing (&landings)[CLAIMS_AT_ONCE], Fetched* fetched, u32 lane) {
  const PrefetchArguments& to = a.prefetch;
  bool waits = candidate.valid && is_open(a, candidate.row), shut = false;
  if (waits) waits = load_shared_value(to.layer.host_to_device + candidate.host_slot) < 0;
  for (u32 left = __ballot_sync(ALL_LANES, waits); left != 0 && !shut;) {
    const bool asks = (left >> lane & 1) && __popc(left & ((1u << lane) - 1)) < CLAIMS_AT_ONCE;
    left &= ~__ballot_sync(ALL_LANES, asks);
    u32 answer = LOST, at = 0;
    if (asks) answer = ask_for(to, a.contexts, candidate, &at);
    shut = __any_sync(ALL_LANES, answer == SHUT);
    for (u32 refused = __ballot_sync(ALL_LANES, answer == REFUSED); refused != 0;) {
      const u32 row = __shfl_sync(ALL_LANES, candidate.row, __ffs(refused) - 1);
      left &= ~__ballot_sync(ALL_LANES, candidate.row == row);
      refused &= refused - 1;
    }
    const u32 granted = __ballot_sync(ALL_LANES, answer == GRANTED);
    if (granted == 0) continue;
    u32 sent = granted;
#pragma unroll
    for (u32 i = 0; i < CLAIMS_AT_ONCE; i++, sent &= sent - 1) {
      if (sent == 0) break;
      const i32 row = __shfl_sync(ALL_LANES, candidate.host_slot, __ffs(sent) - 1);
      send_for_row(landings + i, host_row(to.layer, row), to.layer.row_bytes, lane);
    }
    // Meanwhile, where they go, and whether the others are still wanted.
    const i32 slot = settle_claim(to, list, answer == GRANTED, candidate.host_slot, at, floor,
                                  fetched);
    left &= __ballot_sync(ALL_LANES, (left >> lane & 1) && is_open(a, candidate.row));
    sent = granted;
#pragma unroll
    for (u32 i = 0; i < CLAIMS_AT_ONCE; i++, sent &= sent - 1) {
      if (sent == 0) break;
      land_row(to.layer, landings[i], __shfl_sync(ALL_LANES, slot, __ffs(sent) - 1), lane);
    }
  }
  return !shut;
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
  // Neighbours read neighbouring entries of one list.
  const u32 readers = LISTED_THREADS / a.num_lists;
  const Listed* list = a.lists + u64(block_index() * a.num_lists + thread / readers) * LIST;
  const PrefetchArguments& to = a.prefetch;
  const u32 index = block_index() * LISTED_THREADS + thread;
  if (index < to.rows * to.most) fetch_names_ahead(to.layer, index);
  const i32 floor = *to.layer.floor;
  const ReadyList names = ready_list(to.layer, floor);
  Landing landings[CLAIMS_AT_ONCE];
#pragma unroll
  for (u32 i = 0; i < CLAIMS_AT_ONCE; i++)
    landings[i] =
        make_landing(shared, to.layer.row_bytes, thread / WARP * CLAIMS_AT_ONCE + i, lane);
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
      if (!fetch_found(a, names, candidate, floor, landings, &fetched, lane)) break;
      since = nanoseconds();
      continue;
    }
    if (__all_sync(ALL_LANES, over || nanoseconds() - since > PATIENCE)) break;
    pause();
  }
  add_fetched(to, fetched, lane);
}
