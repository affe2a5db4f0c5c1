// One layer's cache, and how a kernel takes a row in: the claim protocol.
//
// Any number of threads, blocks and kernels may take rows of a layer in at once. A row that is
// absent (host_to_device -1) belongs to whoever swaps PENDING for it (`claim`). The owner takes the
// next place on the layer's ready list, where `choose_victims` has put every slot that may leave,
// each once, oldest first; passes over those whose priority has reached the floor in the meantime;
// unmaps who held the slot, and publishes the mapping (`settle`). Others who want the row wait
// until its entry isn't PENDING any more.
//
// What makes that safe:
// - a place on the list is handed out once, and a slot is on it once: nobody shares a victim;
// - priorities only rise while rows are taken in (atomic maxima), so who was passed over stays;
// - settle() may run only when every row that must not leave in this step, as far as this kernel
//   knows of them, has been raised to the floor: make_resident puts a grid barrier between;
// - a slot's new owner has at least the floor as its priority, so it isn't taken a second time;
// - the list holds all slots of the pool, so it can end only where the rows of one step exceed the
//   pool: then the mapping is published as -1, and the row is missing from the totals.
// A mapping may be published before its row has landed: only later kernels may read device rows.
// Released slots stay on the list as free ones: their owner reads -1, and nobody is unmapped.
#pragma once
#include "device.cuh"

constexpr i32 NONE = -1;
constexpr i32 PENDING = -2;  // in host_to_device: claimed, no device slot yet
constexpr u32 SCORE_BITS = 3, SCORE_LEVELS = 7;

enum Total { HITS, RECALLED, EVICTED, WRITTEN, ALLOCATED };  // columns of the manager's totals

// One layer, as kernels see it; `FusedLayer` in Python.
struct Layer {
  const i32* floor;     // [1]
  i32* host_to_device;  // [N_H]
  i32* priority;        // [N_G]
  i32* device_to_host;  // [N_G]
  u8* device_free;      // [N_G]
  const i32* ready;     // [N_G], who leaves first
  i32* cursor;          // [1], next of them
  u64* totals;          // [5]
  u32* barrier;         // [1]
  u8* host_rows;        // [N_H, row_bytes]
  u8* device_rows;      // [N_G, row_bytes]
  i32 row_bytes;
  i32 num_ready;
};

// Who leaves for a row.
struct Victim {
  u32 place;  // in the ready list
  i32 slot;   // there, or -1: the list has ended
  i32 owner;  // the host slot that it holds, or -1
};

DEVICE bool claim(const Layer& layer, i32 host_slot) {
  return atomicCAS(layer.host_to_device + host_slot, NONE, PENDING) == NONE;
}

DEVICE Victim name_victim(const Layer& layer, u32 place) {
  Victim victim = {place, NONE, NONE};
  if (place < u32(layer.num_ready)) victim.slot = layer.ready[place];
  if (victim.slot >= 0) victim.owner = layer.device_to_host[victim.slot];
  return victim;
}

// Give the victim's slot, or the next one's that may leave, to a claimed row. False: none is left.
DEVICE bool settle(const Layer& layer, Victim* victim, i32 host_slot, i32 level, i32 floor) {
  while (victim->slot >= 0 && load_shared_value(layer.priority + victim->slot) >= floor)
    *victim = name_victim(layer, atomicAdd(layer.cursor, 1));
  const i32 slot = victim->slot;
  if (slot >= 0) {
    if (victim->owner >= 0) store_shared_value(layer.host_to_device + victim->owner, NONE);
    layer.device_to_host[slot] = host_slot;
    layer.device_free[slot] = 0;
    atomicMax(layer.priority + slot, level);
  }
  store_shared_value(layer.host_to_device + host_slot, slot);
  return slot >= 0;
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
