// One layer's cache, and how a kernel takes a row in: the claim protocol.
//
// Any number of threads, blocks and kernels may take rows of a layer in at once. A row that is
// absent (host_to_device -1) belongs to whoever swaps PENDING for it (`claim`). The owner takes the
// next place on the layer's ready list, where `choose_victims` has put every slot that may leave,
// each once, oldest first; passes over those that have been used since; unmaps who held the slot,
// and publishes the mapping (`settle`). Others who want the row wait until its entry isn't PENDING
// any more.
//
// A list serves many steps. Priorities rise whenever a slot is used, and the floor is above them
// all when a list is made: so a slot has been used since exactly when its priority has reached that
// floor, and whoever hasn't is older than whoever has: the list stays in order as it is. What leaves
// it other than from the front is counted (`count_touched`), so that `choose_victims` knows how many
// names are left without looking.
//
// What makes that safe:
// - a place on the list is handed out once, and a slot is on it once: nobody shares a victim;
// - priorities only rise while rows are taken in (atomic maxima), so who was passed over stays;
// - settle() may run only when every row that must not leave in this step, as far as this kernel
//   knows of them, has been raised to the floor: make_resident puts a grid barrier between;
// - a free slot is nobody's, and can't have been used: it is given away at any time, before others have
//   looked too, and while a recall protects what it finds. `choose_victims` therefore has slots free
//   before a step asks for them, which are first on the list; who fetches ahead of the selection, and so
//   beside the recall, takes none but those. (A name that it takes of another slot is lost to the list:
//   the row stays.)
// - a slot's new owner has at least the floor as its priority, so it isn't taken a second time;
// - a step begins with as many names as it may take and touch, or with all slots on a new list, so
//   the list can end only where the rows of one step exceed the pool: then the mapping is published
//   as -1, and the row is missing from the totals.
// A mapping may be published before its row has landed: only later kernels may read device rows.
// Released slots stay on the list as free ones: their owner reads -1, and nobody is unmapped. They
// should go first, though, so that a release asks for a new list.
#pragma once
#include "device.cuh"

constexpr i32 NONE = -1;
constexpr i32 PENDING = -2;  // in host_to_device: claimed, no device slot yet
constexpr u32 SCORE_BITS = 3, SCORE_LEVELS = 7;

enum Cursor { TAKEN, TOUCHED, LISTED, SINCE, BEGAN, CURSOR };  // columns of a layer's cursor

enum Total { HITS, RECALLED, EVICTED, WRITTEN, ALLOCATED, TOTALS };  // columns of the totals

// One layer, as kernels see it; `FusedLayer` in Python.
struct Layer {
  const i32* floor;     // [1]
  i32* host_to_device;  // [N_H]
  i32* priority;        // [N_G]
  i32* device_to_host;  // [N_G]
  u8* device_free;      // [N_G]
  const i32* ready;     // [N_G], who leaves first
  i32* cursor;          // [CURSOR]: names taken, touched and listed, the floor when they were, and
                        // how many were taken when the step began
  u64* totals;          // [5]
  u32* barrier;         // [1]
  u8* host_rows;        // [N_H, row_bytes]
  u8* device_rows;      // [N_G, row_bytes]
  i32 row_bytes;
  i32 slots;  // N_G
};

// Who leaves for a row.
struct Victim {
  u32 place;  // in the ready list
  i32 slot;   // there, or -1: the list has ended
  i32 owner;  // the host slot that it holds, or -1
};

DEVICE u8* host_row(const Layer& layer, i32 host_slot) {
  return layer.host_rows + u64(u32(host_slot)) * layer.row_bytes;
}

DEVICE u8* device_row(const Layer& layer, i32 device_slot) {
  return layer.device_rows + u64(u32(device_slot)) * layer.row_bytes;
}

DEVICE bool claim(const Layer& layer, i32 host_slot) {
  return atomicCAS(layer.host_to_device + host_slot, NONE, PENDING) == NONE;
}

// The next places of the ready list; the first of them.
DEVICE u32 take_names(const Layer& layer, u32 count) {
  return u32(atomicAdd(layer.cursor + TAKEN, i32(count)));
}

// What stays as it is while rows are taken in, kept where no acquiring load makes it be read again.
struct ReadyList {
  u32 names;  // their number
  i32 used;   // the priority from which on a slot has been used since it was listed
};

DEVICE ReadyList ready_list(const Layer& layer, i32 floor) {
  const i32 since = layer.cursor[SINCE];
  return {u32(layer.cursor[LISTED]), since < floor ? since : floor};
}

DEVICE Victim name_victim(const Layer& layer, const ReadyList& list, u32 place) {
  Victim victim = {place, NONE, NONE};
  if (place < list.names) victim.slot = layer.ready[place];
  if (victim.slot >= 0) {
    victim.owner = layer.device_to_host[victim.slot];
    fetch_line(layer.priority + victim.slot);  // which settle() looks at
  }
  return victim;
}

// Whether there is one whose slot is free.
DEVICE bool is_free(const Victim& victim) { return victim.slot >= 0 && victim.owner < 0; }

// The victim, or the next one on the list that hasn't been used since it was listed.
DEVICE void pass_over_used(const Layer& layer, const ReadyList& list, Victim* victim) {
  while (victim->slot >= 0 && load_shared_value(layer.priority + victim->slot) >= list.used)
    *victim = name_victim(layer, list, take_names(layer, 1));
}

// Give the victim's slot to a row. False: there is none.
DEVICE bool give_slot(const Layer& layer, const Victim& victim, i32 host_slot, i32 level) {
  const i32 slot = victim.slot;
  if (slot >= 0) {
    if (victim.owner >= 0) store_shared_value(layer.host_to_device + victim.owner, NONE);
    layer.device_to_host[slot] = host_slot;
    layer.device_free[slot] = 0;
    raise_shared_value(layer.priority + slot, level);
  }
  store_shared_value(layer.host_to_device + host_slot, slot);
  return slot >= 0;
}

// Give the victim's slot, or the next one's that may leave, to a claimed row. False: none is left.
DEVICE bool settle(const Layer& layer, const ReadyList& list, Victim* victim, i32 host_slot,
                   i32 level) {
  if (!is_free(*victim)) pass_over_used(layer, list, victim);
  return give_slot(layer, *victim, host_slot, level);
}

// Some slots that were raised were still on the list: `touched` of them.
DEVICE void count_touched(const Layer& layer, u32 touched) {
  if (touched != 0) atomicAdd(layer.cursor + TOUCHED, i32(touched));
}

// Where a row is that somebody else has claimed; -1 if no slot was left for it.
DEVICE i32 await_claim(const Layer& layer, i32 host_slot) {
  i32 slot;
  do {
    slot = load_shared_value(layer.host_to_device + host_slot);
  } while (slot == PENDING);
  return slot;
}

DEVICE void add_total(u64* totals, Total column, u32 value) {
  if (value != 0) atomicAdd(totals + column, u64(value));
}
