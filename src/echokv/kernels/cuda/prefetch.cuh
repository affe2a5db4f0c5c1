// Fetching rows while scores are made: what passes from the warps that score to those that fetch.
//
//   scoring warps --candidates--> intake warp --tasks--> fetching warps --claims--> device pool
//                                     |
//                                     +--> the row's list in device memory --> `fetch_late`
//
// A candidate is a position whose score is at least the row's predicted k-th score. Both arrows in
// a block are rings in shared memory with one writer and one reader each, so they need no atomics.
// Nobody waits for room in a ring: a candidate that finds none among the first is forgotten, which
// costs a later recall and nothing else; one that finds none among the second stays on its list.
//
// The intake warp drops candidates that are resident, and asks the row's budget for the others:
// `counts` is raised by as many, and what exceeds the budget is given back, so that it ends at what
// was granted and no grant is made twice. A granted candidate is written to the row's list, as
// wanted, and handed on. A fetching warp claims it, takes a victim and publishes the mapping by the
// protocol of claims.cuh, at the floor (protected in this step, below whatever is selected in it),
// notes on the list that it was fetched, and copies the row. Nobody reads device rows before the
// kernel is over, so the mapping may be published before the row has landed.
//
// - No slot is lost to a budget that has run out: nothing is claimed before its budget is granted.
// - Rows that requests share are claimed once; the others see the claim, or the mapping, and pass.
// - A victim may be a candidate that was seen as resident: then it is recalled after the top-k,
//   like every row that no prediction named.
// - When all scores are made nothing more is claimed: the kernel ends when the rows that are on
//   their way have landed. `fetch_late`, a later launch that may run beside the top-k but not
//   beside anything else that takes rows in, fetches what is on the lists and still absent.
#pragma once
#include "claims.cuh"
#include "schedule.cuh"

#ifndef RING_ENTRIES
#define RING_ENTRIES 64
#endif
constexpr u32 RING = RING_ENTRIES;  // a power of two, at least WARP
constexpr u32 OVER = 1u << 31;      // in a ring's tail: nothing will follow
constexpr u32 BUDGET_UNIT = 1u << 16;
constexpr u32 WORDS_IN_FLIGHT = 3;  // of sixteen bytes, a lane
constexpr u32 MAX_FETCHING = 2;     // fetching warps of a block
constexpr u32 TASKS_AT_ONCE = 4;    // of a fetching warp

struct Ring {
  u32 tail;  // entries ever written, and OVER; its writer's
  u32 head;  // entries ever taken; its reader's
  i32 host_slots[RING];
  float scores[RING];
  u32 rows[RING];
};

struct PrefetchArguments {
  Layer layer;               // whose totals count what is prefetched
  const i32* request_slots;  // [rows], entries of thresholds and enabled; -1: none
  const float* thresholds;   // [slots], predicted k-th scores
  const i32* enabled;        // [slots]
  i32* counts;               // [rows], candidates within the budget; 0 at first
  i32* host_slots;           // [rows, most], lists: fetched, wanted(slot) or -1; -1 at first
  float* scores;             // [rows, most], of all candidates within the budget; -inf at first
  u32 most;
  u32 rows_per_unit;
  u32 least;
  u32 rows;
};

// The score that a row's candidates must reach; NaN, which nothing does, where there is none.
DEVICE float threshold_of(const PrefetchArguments& a, u32 row) {
  const i32 slot = a.request_slots[row];
  const float threshold = slot < 0 ? bits_float(0x7fc00000u) : a.thresholds[slot];
  return threshold < bits_float(0x7f800000u) ? threshold : bits_float(0x7fc00000u);
}

DEVICE u32 budget_of(const PrefetchArguments& a, const Contexts& contexts, u32 row) {
  const u64 by_length = u64(tokens_of(contexts, row)) * a.rows_per_unit / BUDGET_UNIT;
  return by_length + a.least < a.most ? u32(by_length) + a.least : a.most;
}

// Offer the lanes' candidates; all of a warp. Returns the ring's new tail.
DEVICE u32 offer(Ring* ring, u32 tail, bool candidate, i32 host_slot, float score, u32 row,
                 u32 lane) {
  const u32 chosen = __ballot_sync(ALL_LANES, candidate);
  if (chosen == 0) return tail;
  const u32 head = __shfl_sync(ALL_LANES, lane == 0 ? load_from_block(&ring->head) : 0, 0);
  const u32 room = RING - (tail - head);
  const u32 place = __popc(chosen & ((1u << lane) - 1));
  if (candidate && place < room) {
    const u32 at = (tail + place) % RING;
    ring->host_slots[at] = host_slot;
    ring->scores[at] = score;
    ring->rows[at] = row;
  }
  warp_sync();
  tail += smaller(__popc(chosen), room);
  if (lane == 0) store_to_block(&ring->tail, tail);
  return tail;
}

DEVICE void end_offers(Ring* ring, u32 tail, u32 lane) {
  if (lane == 0) store_to_block(&ring->tail, tail | OVER);
}

// What one lane has in hand.
struct Candidate {
  bool valid;
  i32 host_slot;
  float score;
  u32 row;
};

DEVICE i32 wanted(i32 host_slot) { return -2 - host_slot; }  // and back

// Places among the row's candidates for the lanes that ask; at least `most` where there is none.
DEVICE u32 ask_budget(const PrefetchArguments& a, const Contexts& contexts, u32 row, bool asks,
                      u32 lane) {
  u32 place = a.most;
  for (u32 left = __ballot_sync(ALL_LANES, asks); left != 0;) {
    const u32 leader = __ffs(left) - 1;
    const u32 row_of_leader = __shfl_sync(ALL_LANES, row, leader);
    const bool mine = asks && row == row_of_leader;
    const u32 same = __ballot_sync(ALL_LANES, mine), wanted = __popc(same);
    u32 before = 0, budget = 0;
    if (lane == leader) {
      budget = budget_of(a, contexts, row);
      before = u32(atomicAdd(a.counts + row, i32(wanted)));
      const u32 room = before < budget ? budget - before : 0;
      if (wanted > room) atomicAdd(a.counts + row, -i32(wanted - room));
    }
    before = __shfl_sync(ALL_LANES, before, leader);
    budget = __shfl_sync(ALL_LANES, budget, leader);
    const u32 mine_at = before + __popc(same & ((1u << lane) - 1));
    if (mine && mine_at < budget) place = mine_at;
    left &= ~same;
  }
  return place;
}

// One row by one warp: asked for whole before it is written.
DEVICE void fetch_row(const Layer& layer, i32 host_slot, i32 slot, u32 lane) {
  const u32 row_bytes = layer.row_bytes;
  const u8* from = layer.host_rows + u64(u32(host_slot)) * row_bytes;
  u8* to = layer.device_rows + u64(u32(slot)) * row_bytes;
  for (u32 start = lane * 16; start < row_bytes; start += WORDS_IN_FLIGHT * WARP * 16) {
    Words words[WORDS_IN_FLIGHT];
#pragma unroll
    for (u32 i = 0; i < WORDS_IN_FLIGHT; i++)
      if (start + i * WARP * 16 < row_bytes) words[i] = load_row_words(from + start + i * WARP * 16);
#pragma unroll
    for (u32 i = 0; i < WORDS_IN_FLIGHT; i++)
      if (start + i * WARP * 16 < row_bytes) store_row_words(to + start + i * WARP * 16, words[i]);
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

// Fetch the lanes' rows that are still absent; `at` is where they are on the lists.
DEVICE void take_in(const PrefetchArguments& a, bool wants, i32 host_slot, u32 at, i32 floor,
                    Fetched* fetched, u32 lane) {
  const Layer& layer = a.layer;
  const bool mine = wants && claim(layer, host_slot);
  const u32 claims = __ballot_sync(ALL_LANES, mine);
  if (claims == 0) return;
  u32 first = 0;
  if (lane == 0) first = u32(atomicAdd(layer.cursor, i32(__popc(claims))));
  first = __shfl_sync(ALL_LANES, first, 0);
  Victim victim = {0, NONE, NONE};
  bool settled = false;
  if (mine) {
    victim = name_victim(layer, first + __popc(claims & ((1u << lane) - 1)));
    settled = settle(layer, &victim, host_slot, floor, floor);
    if (settled) a.host_slots[at] = host_slot;
  }
  fetched->evicted += __popc(__ballot_sync(ALL_LANES, settled && victim.owner >= 0));
  u32 left = __ballot_sync(ALL_LANES, settled);
  fetched->rows += __popc(left);
  for (; left != 0; left &= left - 1) {
    const u32 from = __ffs(left) - 1;
    fetch_row(layer, __shfl_sync(ALL_LANES, host_slot, from),
              __shfl_sync(ALL_LANES, victim.slot, from), lane);
  }
}

// What waits in a ring: all lanes get the same.
struct Waiting {
  u32 head, count;
  bool over;
};

DEVICE Waiting look_into(Ring* ring, u32 lane) {
  const u32 word = __shfl_sync(ALL_LANES, lane == 0 ? load_from_block(&ring->tail) : 0, 0);
  const u32 head = ring->head;
  return {head, (word & ~OVER) - head, (word & OVER) != 0};
}

// Up to `most` entries, one a lane.
DEVICE Candidate take_from(Ring* ring, const Waiting& waiting, u32 most, u32 lane) {
  const u32 count = smaller(waiting.count, most);
  Candidate candidate = {lane < count, NONE, 0, 0};
  if (candidate.valid) {
    const u32 at = (waiting.head + lane) % RING;
    candidate = {true, ring->host_slots[at], ring->scores[at], ring->rows[at]};
  }
  warp_sync();
  if (lane == 0) store_to_block(&ring->head, waiting.head + count);
  warp_sync();  // every lane reads the new head next time
  return candidate;
}

// Put the lanes' candidates on their rows' lists as far as budgets go. Where: ALL_LANES if nowhere,
// or if the row isn't to be fetched.
DEVICE u32 put_on_list(const PrefetchArguments& a, const Contexts& contexts,
                       const Candidate& candidate, u32 lane) {
  i32 found = 0;
  bool enabled = false;
  if (candidate.valid) {
    found = load_shared_value(a.layer.host_to_device + candidate.host_slot);
    enabled = a.enabled[a.request_slots[candidate.row]] != 0;
  }
  const u32 place = ask_budget(a, contexts, candidate.row, found < 0, lane);
  if (found >= 0 || place >= a.most) return ALL_LANES;
  const u32 at = candidate.row * a.most + place;
  a.scores[at] = candidate.score;
  if (!enabled) return ALL_LANES;
  a.host_slots[at] = wanted(candidate.host_slot);
  return at;
}

// The intake warp, until nothing follows in any ring of the scoring warps.
DEVICE void take_candidates(const PrefetchArguments& a, const Contexts& contexts, Ring* rings,
                            u32 scoring, Ring* tasks, u32 fetching, u32 lane) {
  u32 tails[MAX_FETCHING] = {}, turn = 0;
  for (bool over = false; !over;) {
    over = true;
    bool idle = true;
    for (u32 index = 0; index < scoring; index++) {
      const Waiting waiting = look_into(rings + index, lane);
      over = over && waiting.over && waiting.count == 0;
      if (waiting.count == 0) continue;
      idle = false;
      const Candidate candidate = take_from(rings + index, waiting, WARP, lane);
      const u32 at = put_on_list(a, contexts, candidate, lane);
      const u32 mine = (lane + turn++) % fetching;  // fetching warps share what there is
#pragma unroll
      for (u32 warp = 0; warp < MAX_FETCHING; warp++)
        if (warp < fetching)
          tails[warp] = offer(tasks + warp, tails[warp], at != ALL_LANES && mine == warp,
                              candidate.host_slot, 0, at, lane);
    }
    if (idle && !over) pause();
  }
#pragma unroll
  for (u32 warp = 0; warp < MAX_FETCHING; warp++)
    if (warp < fetching) end_offers(tasks + warp, tails[warp], lane);
}

// A fetching warp, until all scores are made.
DEVICE void fetch_tasks(const PrefetchArguments& a, Ring* tasks, u32 lane) {
  const i32 floor = *a.layer.floor;
  Fetched fetched = {0, 0};
  for (;;) {
    const Waiting waiting = look_into(tasks, lane);
    if (waiting.over) break;
    if (waiting.count == 0) {
      pause();
      continue;
    }
    const Candidate task = take_from(tasks, waiting, TASKS_AT_ONCE, lane);
    take_in(a, task.valid, task.host_slot, task.row, floor, &fetched, lane);
  }
  add_fetched(a, fetched, lane);
}

// What is on the lists and absent: a few entries a warp at a time.
DEVICE void fetch_wanted(const PrefetchArguments& a, u32 warp, u32 warps, u32 lane) {
  const i32 floor = *a.layer.floor;
  const u32 entries = a.rows * a.most;
  Fetched fetched = {0, 0};
  for (u32 start = warp * TASKS_AT_ONCE; start < entries; start += warps * TASKS_AT_ONCE) {
    const u32 at = start + lane;
    i32 entry = NONE;
    if (lane < TASKS_AT_ONCE && at < entries) entry = a.host_slots[at];
    const bool wants = entry < NONE;
    if (wants) a.host_slots[at] = NONE;
    take_in(a, wants, wanted(entry), at, floor, &fetched, lane);
  }
  add_fetched(a, fetched, lane);
}
