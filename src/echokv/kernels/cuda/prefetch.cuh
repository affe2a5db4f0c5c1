// Fetching rows while scores are made: what passes from the warps that score to those that fetch.
//
//   scoring warp --candidates--> ring in shared memory --> fetching warp --claims--> device pool
//
// A candidate is a position whose score is at least the row's predicted k-th score. Each scoring
// warp has a ring of its own, read by one fetching warp: one writer, one reader, no atomics. The
// scoring warp never waits: what finds no room in the ring is forgotten, which costs a later recall
// and nothing else. The fetching warp takes up to 32 candidates at once and
// 1. drops those that are resident or that somebody else has claimed;
// 2. asks the row's budget for the others: `counts` is raised by as many, and what exceeds the
//    budget is given back, so that it ends at what was granted and no grant is made twice;
// 3. claims what was granted, takes victims and publishes the mappings, by the protocol of
//    claims.cuh, at the floor: protected in this step, below whatever is selected in it;
// 4. copies the rows. Nobody reads device rows before this kernel is over, so the mapping may be
//    published before the row has landed.
// Nothing is claimed before its budget is granted, so no slot is lost to a budget that has run out.
// Rows that requests share are claimed once; the others see the claim, or the mapping, and pass on.
// A victim may be a candidate that was seen as resident: then it is recalled after the top-k, like
// every row that no prediction named.
//
// When all scores are made, and `finish` is 0, what is in the rings is dropped: the kernel ends when
// the rows already claimed have landed.
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
  i32* host_slots;           // [rows, most], those that were fetched; -1 at first
  float* scores;             // [rows, most], of all candidates within the budget; -inf at first
  u32 most;
  u32 rows_per_unit;
  u32 least;
  u32 finish;
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

struct Fetched {
  u32 recalled, evicted;
};

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

// Steps 1 to 4 for the candidates of a warp's lanes.
DEVICE void fetch(const PrefetchArguments& a, const Contexts& contexts, const Candidate& candidate,
                  i32 floor, Fetched* fetched, u32 lane) {
  const Layer& layer = a.layer;
  i32 found = 0, slot_of_request = NONE;
  if (candidate.valid) {
    found = load_shared_value(layer.host_to_device + candidate.host_slot);
    slot_of_request = a.request_slots[candidate.row];
  }
  const u32 place = ask_budget(a, contexts, candidate.row, found < 0, lane);
  const bool granted = found < 0 && place < a.most;
  const u64 at = u64(candidate.row) * a.most + place;
  if (granted) a.scores[at] = candidate.score;
  const bool mine =
      granted && a.enabled[slot_of_request] != 0 && claim(layer, candidate.host_slot);
  const u32 claims = __ballot_sync(ALL_LANES, mine);
  if (claims == 0) return;
  u32 first = 0;
  if (lane == 0) first = u32(atomicAdd(layer.cursor, i32(__popc(claims))));
  first = __shfl_sync(ALL_LANES, first, 0);
  Victim victim = {0, NONE, NONE};
  bool settled = false;
  if (mine) {
    victim = name_victim(layer, first + __popc(claims & ((1u << lane) - 1)));
    settled = settle(layer, &victim, candidate.host_slot, floor, floor);
    if (settled) a.host_slots[at] = candidate.host_slot;
  }
  fetched->evicted += __popc(__ballot_sync(ALL_LANES, settled && victim.owner >= 0));
  u32 left = __ballot_sync(ALL_LANES, settled);
  fetched->recalled += __popc(left);
  for (; left != 0; left &= left - 1) {
    const u32 from = __ffs(left) - 1;
    fetch_row(layer, __shfl_sync(ALL_LANES, candidate.host_slot, from),
              __shfl_sync(ALL_LANES, victim.slot, from), lane);
  }
}

// One fetching warp: rings first, first + step, ... until nothing follows in any of them.
DEVICE void fetch_candidates(const PrefetchArguments& a, const Contexts& contexts, Ring* rings,
                             u32 first, u32 step, u32 count, u32 lane) {
  const i32 floor = *a.layer.floor;
  Fetched fetched = {0, 0};
  for (bool over = false; !over;) {
    over = true;
    bool idle = true;
    for (u32 index = first; index < count; index += step) {
      Ring* ring = rings + index;
      const u32 head = ring->head;
      const u32 word = __shfl_sync(ALL_LANES, lane == 0 ? load_from_block(&ring->tail) : 0, 0);
      const u32 waiting = (word & ~OVER) - head;
      if ((word & OVER) == 0) over = false;
      if (waiting == 0 || ((word & OVER) != 0 && a.finish == 0)) continue;
      over = idle = false;
      Candidate candidate = {lane < waiting, NONE, 0, 0};
      if (candidate.valid) {
        const u32 at = (head + lane) % RING;
        candidate = {true, ring->host_slots[at], ring->scores[at], ring->rows[at]};
      }
      warp_sync();
      if (lane == 0) store_to_block(&ring->head, head + smaller(waiting, WARP));
      warp_sync();  // so that every lane reads the new head next time
      fetch(a, contexts, candidate, floor, &fetched, lane);
    }
    if (idle && !over) pause();
  }
  if (lane == 0) {
    add_total(a.layer.totals, RECALLED, fetched.recalled);
    add_total(a.layer.totals, EVICTED, fetched.evicted);
    add_total(a.layer.totals, ALLOCATED, fetched.recalled);
  }
}
