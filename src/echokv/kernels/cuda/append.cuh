// New rows: to host always, and to the device slots that they take in this step.
//
// A thread looks a row up, a warp moves it. A block guesses before it has looked that every row is
// absent and nobody else takes names: who leaves is known when that is. One that isn't alone tells
// the grid that it has looked, but waits for the others only where it has to. An absent row is its
// own without a claim; those who select it claim it, and by that only wait for it.
#pragma once
#include "claims.cuh"
#include "rows.cuh"

#ifndef RECALL_THREADS
#define RECALL_THREADS 512
#endif

struct NewRows {
  const i32* host_slots;  // [count], distinct
  const u8* rows;         // [count, row_bytes]
  i32 count;
  i32 each;    // rows of a block, at most one a thread
  i32 staged;  // whether a block's rows fit into its shared memory and are made of 16-byte words
  i32 pad;
};

template <u32 THREADS>
struct alignas(16) AppendShared {
  u32 absent[THREADS / WARP];
  u32 written, evicted, allocated, touched;
  u32 place;    // the block's first one in the ready list
  u32 arrived;  // what grid_arrive returned
  u32 pad[2];
  i32 slots[THREADS];  // of the rows, in the device pool
};
static_assert(sizeof(AppendShared<RECALL_THREADS>) ==
                  (4 * (RECALL_THREADS / WARP + 8 + RECALL_THREADS) + 15) / 16 * 16,
              "append.py");

// A block's rows, wherever they are read from.
struct BlockRows {
  const u8* from;
  u8* stage;  // in shared memory; null: they aren't there
  u32 count;
  u32 row_bytes;
};

template <u32 WARPS>
DEVICE void stage_rows(const BlockRows& rows, u32 warp, u32 lane) {
  for (u32 row = warp; row < rows.count; row += WARPS)
    for (u32 at = lane * 16; at < rows.row_bytes; at += WARP * 16)
      copy_async(rows.stage + row * rows.row_bytes + at,
                 rows.from + u64(row) * rows.row_bytes + at);
}

// Each thread moves what it staged.
template <u32 WARPS>
DEVICE void move_rows(const BlockRows& rows, u8* pool, const i32* slots, u32 warp, u32 lane) {
  for (u32 row = warp; row < rows.count; row += WARPS) {
    if (slots[row] < 0) continue;
    u8* to = pool + u64(u32(slots[row])) * rows.row_bytes;
    if (rows.stage != nullptr) {
      for (u32 at = lane * 16; at < rows.row_bytes; at += WARP * 16)
        store_row_words(to + at, load_words(rows.stage + row * rows.row_bytes + at));
    } else {
      copy_row(to, rows.from + u64(row) * rows.row_bytes, rows.row_bytes, false, lane);
    }
  }
}

// A block's part of an append, from its `first` row on. All blocks of a grid that isn't `alone` use
// the layer's barrier, whatever they do.
template <u32 THREADS>
DEVICE void append_block(const Layer& layer, const NewRows& a, u32 first, bool alone) {
  constexpr u32 WARPS = THREADS / WARP;
  AppendShared<THREADS>* shared = reinterpret_cast<AppendShared<THREADS>*>(shared_memory());
  const u32 thread = thread_index(), lane = thread % WARP, warp = thread / WARP;
  const u32 mover = WARPS - 1 - warp;  // the first warps have rows to look up
  u8* stage = a.staged ? shared_memory() + sizeof(AppendShared<THREADS>) : nullptr;
  const BlockRows rows = {a.rows + u64(first) * layer.row_bytes, stage,
                          smaller(a.each, u32(a.count) - first), u32(layer.row_bytes)};
  if (a.staged) stage_rows<WARPS>(rows, mover, lane);
  if (thread == 0) shared->written = shared->evicted = shared->allocated = shared->touched = 0;
  block_sync();

  const i32 floor = *layer.floor;
  const ReadyList list = ready_list(layer, floor);
  const i32 host_slot = thread < rows.count ? a.host_slots[first + thread] : NONE;
  const u32 guess = u32(load_shared_value(layer.cursor + TAKEN)) + thread;
  const i32 found = host_slot >= 0 ? load_shared_value(layer.host_to_device + host_slot) : NONE;
  const bool missing = host_slot >= 0 && found < 0;
  Victim victim = {ALL_LANES, NONE, NONE};
  if (host_slot >= 0) victim = name_victim(layer, list, guess);
  i32 before = floor;  // its priority
  if (found >= 0) before = atomicMax(layer.priority + found, floor);
  const u32 absent = __ballot_sync(ALL_LANES, missing);
  const u32 touched = __ballot_sync(ALL_LANES, before < list.used);
  if (lane == 0) shared->absent[warp] = __popc(absent);
  if (lane == 0 && touched != 0) atomicAdd(&shared->touched, __popc(touched));
  block_sync();  // every row that is there is protected

  u32 total;
  const u32 warps_before = lanes_before(lane < WARPS ? shared->absent[lane] : 0, lane, &total);
  const u32 nth = __shfl_sync(ALL_LANES, warps_before, warp) + __popc(absent & ((1u << lane) - 1));
  if (thread == WARP && total != 0) shared->place = take_names(layer, total);
  if (thread == 0 && !alone)
    shared->arrived = grid_arrive(layer.barrier, block_index(), grid_size());
  if (thread == 0) count_touched(layer, shared->touched);
  async_wait();
  move_rows<WARPS>(rows, layer.host_rows, a.host_slots + first, mover, lane);
  block_sync();  // every place is taken

  i32 slot = found;
  bool settled = false;
  if (missing) {
    if (victim.place != shared->place + nth) victim = name_victim(layer, list, shared->place + nth);
    // A free slot is taken at once: no row in it can be found, nor has it been used. For another to
    // be passed over or unmapped, or for the row to be absent after all, all blocks must have looked:
    // until then the other's row may be found, and this one be claimed by those who will follow it.
    if (victim.slot < 0 || victim.owner >= 0) {
      if (!alone) grid_wait(layer.barrier, shared->arrived);
      pass_over_used(layer, list, &victim);
    }
    settled = give_slot(layer, victim, host_slot, floor);
    slot = victim.slot;
  }
  if (thread < rows.count) shared->slots[thread] = slot;
  const u32 allocated = __popc(__ballot_sync(ALL_LANES, settled));
  const u32 evicted = __popc(__ballot_sync(ALL_LANES, settled && victim.owner >= 0));
  if (lane == 0 && absent != 0) {
    atomicAdd(&shared->written, __popc(absent));
    atomicAdd(&shared->allocated, allocated);
    atomicAdd(&shared->evicted, evicted);
  }
  block_sync();
  move_rows<WARPS>(rows, layer.device_rows, shared->slots, mover, lane);
  if (thread == 0) {
    add_total(layer.totals, WRITTEN, shared->written);
    add_total(layer.totals, EVICTED, shared->evicted);
    add_total(layer.totals, ALLOCATED, shared->allocated);
  }
}
