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
// Rows that a fetching warp claims at once. What is claimed when the last score is made must still
// land, at 264 warps on the device: few, but enough to keep PCIe busy while claims wait for memory.
constexpr u32 TASKS_AT_ONCE = 2;
constexpr u32 LATE_AT_ONCE = 4;  // of a warp of `fetch_late`

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

// The rows of some lanes, one after the other; the next is asked for before one is written. `first`
// is the first part of the first. A slot of -1: that row has nowhere to go.
DEVICE void copy_rows(const Layer& layer, RowPart first, i32 host_slot, i32 slot, u32 lanes,
                      u32 lane) {
  const u32 row_bytes = layer.row_bytes;
  RowPart part = first;
  while (lanes != 0) {
    const u32 mine = __ffs(lanes) - 1;
    lanes &= lanes - 1;
    const u8* from = host_row(layer, __shfl_sync(ALL_LANES, host_slot, mine));
    const i32 where = __shfl_sync(ALL_LANES, slot, mine);
    RowPart next = part;
    if (lanes != 0) {
      const i32 after = __shfl_sync(ALL_LANES, host_slot, __ffs(lanes) - 1);
      next = load_part(host_row(layer, after), row_bytes, lane);
    }
    if (where >= 0) {
      u8* to = layer.device_rows + u64(u32(where)) * row_bytes;
      store_part(to, part, row_bytes, lane);
      for (u32 at = PART_BYTES; at < row_bytes; at += PART_BYTES)
        store_part(to + at, load_part(from + at, row_bytes - at, lane), row_bytes - at, lane);
    }
    part = next;
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
  // The first row is on its way while its victim is looked for.
  const i32 next = __shfl_sync(ALL_LANES, host_slot, __ffs(claims) - 1);
  const RowPart part = load_part(host_row(layer, next), layer.row_bytes, lane);
  u32 first = 0;
  if (lane == 0) first = take_names(layer, __popc(claims));
  first = __shfl_sync(ALL_LANES, first, 0);
  Victim victim = {0, NONE, NONE};
  bool settled = false;
  if (mine) {
    victim = name_victim(layer, first + __popc(claims & ((1u << lane) - 1)));
    settled = settle(layer, &victim, host_slot, floor, floor);
    if (settled) a.host_slots[at] = host_slot;
  }
  fetched->evicted += __popc(__ballot_sync(ALL_LANES, settled && victim.owner >= 0));
  fetched->rows += __popc(__ballot_sync(ALL_LANES, settled));
  copy_rows(layer, part, host_slot, victim.slot, claims, lane);
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

// The intake warp, until nothing follows in any ring. It looks into all of them at once, as many
// lanes each, since most of what a candidate takes is waiting for memory.
DEVICE void take_candidates(const PrefetchArguments& a, const Contexts& contexts, Ring* rings,
                            u32 scoring, Ring* tasks, u32 fetching, u32 lane) {
  const u32 each = WARP / scoring, nth = lane % each;
  const bool reads = lane < each * scoring;
  Ring* ring = rings + (reads ? lane / each : 0);
  u32 head = 0, tails[MAX_FETCHING] = {}, turn = 0;
  for (bool over = false; !over;) {
    const u32 seen = reads && nth == 0 ? load_from_block(&ring->tail) : 0;
    const u32 word = __shfl_sync(ALL_LANES, seen, lane / each * each);
    const u32 waiting = reads ? (word & ~OVER) - head : 0, taken = smaller(waiting, each);
    warp_sync();  // what came before the tail can be seen by all lanes
    over = __all_sync(ALL_LANES, !reads || ((word & OVER) != 0 && waiting == 0));
    Candidate candidate = {nth < taken, NONE, 0, 0};
    if (candidate.valid) {
      const u32 at = (head + nth) % RING;
      candidate = {true, ring->host_slots[at], ring->scores[at], ring->rows[at]};
    }
    warp_sync();
    head += taken;
    if (taken != 0 && nth == 0) store_to_block(&ring->head, head);
    if (!__any_sync(ALL_LANES, candidate.valid)) {
      if (!over) pause();
      continue;
    }
    const u32 at = put_on_list(a, contexts, candidate, lane);
    const u32 mine = (lane + turn++) % fetching;  // fetching warps share what there is
#pragma unroll
    for (u32 warp = 0; warp < MAX_FETCHING; warp++)
      if (warp < fetching)
        tails[warp] = offer(tasks + warp, tails[warp], at != ALL_LANES && mine == warp,
                            candidate.host_slot, 0, at, lane);
  }
#pragma unroll
  for (u32 warp = 0; warp < MAX_FETCHING; warp++)
    if (warp < fetching) end_offers(tasks + warp, tails[warp], lane);
}

// A fetching warp, until all scores are made.
DEVICE void fetch_tasks(const PrefetchArguments& a, Ring* tasks, u32 lane) {
  const i32 floor = *a.layer.floor;
  Fetched fetched = {0, 0};
  for (u32 head = 0;;) {
    const u32 word = __shfl_sync(ALL_LANES, lane == 0 ? load_from_block(&tasks->tail) : 0, 0);
    if ((word & OVER) != 0) break;
    const u32 taken = smaller(word - head, TASKS_AT_ONCE);
    if (taken == 0) {
      pause();
      continue;
    }
    warp_sync();  // what came before the tail can be seen by all lanes
    const bool wants = lane < taken;
    const u32 entry = (head + lane) % RING;
    const i32 host_slot = wants ? tasks->host_slots[entry] : NONE;
    const u32 at = wants ? tasks->rows[entry] : 0;
    warp_sync();
    head += taken;
    if (lane == 0) store_to_block(&tasks->head, head);
    take_in(a, wants, host_slot, at, floor, &fetched, lane);
  }
  add_fetched(a, fetched, lane);
}

// What is on the lists and absent: a few entries a warp at a time.
DEVICE void fetch_wanted(const PrefetchArguments& a, u32 warp, u32 warps, u32 lane) {
  const i32 floor = *a.layer.floor;
  const u32 entries = a.rows * a.most;
  Fetched fetched = {0, 0};
  for (u32 start = warp * LATE_AT_ONCE; start < entries; start += warps * LATE_AT_ONCE) {
    const u32 at = start + lane;
    i32 entry = NONE;
    if (lane < LATE_AT_ONCE && at < entries) entry = a.host_slots[at];
    const bool wants = entry < NONE;
    if (wants) a.host_slots[at] = NONE;
    take_in(a, wants, wanted(entry), at, floor, &fetched, lane);
  }
  add_fetched(a, fetched, lane);
}
