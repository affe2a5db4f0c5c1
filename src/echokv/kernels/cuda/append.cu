// New rows: to host always, and to the device slots that they take in this step.
//
// A thread looks a row up, a warp moves it. One block, where that is enough, needs no barrier over
// the grid, and guesses before it has looked that every row is absent and nobody else takes names:
// who leaves is known when that is.
#include "claims.cuh"
#include "rows.cuh"

#ifndef RECALL_THREADS
#define RECALL_THREADS 512
#endif
constexpr u32 THREADS = RECALL_THREADS;
constexpr u32 WARPS = THREADS / WARP;

struct alignas(16) AppendShared {
  u32 absent[WARPS];
  u32 written, evicted, allocated, touched;
  u32 place;  // the block's first one in the ready list
  u32 pad[3];
  i32 slots[THREADS];  // of the rows, in the device pool
};
static_assert(sizeof(AppendShared) == (4 * (WARPS + 8 + THREADS) + 15) / 16 * 16, "append.py");

struct AppendArguments {
  Layer layer;
  const i32* host_slots;  // [rows], distinct
  const u8* rows;         // [rows, row_bytes]
  i32 num_rows;
  i32 each;    // rows of a block, at most THREADS
  i32 staged;  // whether a block's rows fit into its shared memory and are made of 16-byte words
  i32 pad;
};

// A block's rows, wherever they are read from.
struct NewRows {
  const u8* from;
  u8* stage;  // in shared memory
  u32 count;
};

DEVICE void stage_rows(const AppendArguments& a, const NewRows& rows, u32 warp, u32 lane) {
  const u32 row_bytes = a.layer.row_bytes;
  for (u32 row = warp; row < rows.count; row += WARPS)
    for (u32 at = lane * 16; at < row_bytes; at += WARP * 16)
      copy_async(rows.stage + row * row_bytes + at, rows.from + u64(row) * row_bytes + at);
}

// Each warp moves the rows that it staged.
DEVICE void move_rows(const AppendArguments& a, const NewRows& rows, u8* pool, const i32* slots,
                      u32 warp, u32 lane) {
  const u32 row_bytes = a.layer.row_bytes;
  for (u32 row = warp; row < rows.count; row += WARPS) {
    if (slots[row] < 0) continue;
    u8* to = pool + u64(u32(slots[row])) * row_bytes;
    if (a.staged) {
      for (u32 at = lane * 16; at < row_bytes; at += WARP * 16)
        store_row_words(to + at, load_words(rows.stage + row * row_bytes + at));
    } else {
      copy_row(to, rows.from + u64(row) * row_bytes, row_bytes, false, lane);
    }
  }
}

KERNEL(RECALL_THREADS, 2) void append_rows(ARGUMENTS AppendArguments a) {
  AppendShared* shared = reinterpret_cast<AppendShared*>(shared_memory());
  const u32 thread = thread_index(), lane = thread % WARP, warp = thread / WARP;
  const u32 first = block_index() * a.each;
  const NewRows rows = {a.rows + u64(first) * a.layer.row_bytes,
                        shared_memory() + sizeof(AppendShared),
                        smaller(a.each, u32(a.num_rows) - first)};
  const bool alone = grid_size() == 1;
  wait_for_previous();
  if (a.staged) stage_rows(a, rows, warp, lane);
  if (thread == 0) shared->written = shared->evicted = shared->allocated = shared->touched = 0;
  block_sync();

  const i32 floor = *a.layer.floor, used = used_since(a.layer, floor);
  const i32 host_slot = thread < rows.count ? a.host_slots[first + thread] : NONE;
  const u32 guess = alone ? u32(load_shared_value(a.layer.cursor + TAKEN)) + thread : 0;
  Victim victim = {ALL_LANES, NONE, NONE};
  if (alone && host_slot >= 0) victim = name_victim(a.layer, guess);
  const i32 found = host_slot >= 0 ? load_shared_value(a.layer.host_to_device + host_slot) : NONE;
  const bool missing = host_slot >= 0 && found < 0;
  i32 before = floor;  // its priority
  if (found >= 0) before = atomicMax(a.layer.priority + found, floor);
  const u32 absent = __ballot_sync(ALL_LANES, missing);
  const u32 touched = __ballot_sync(ALL_LANES, before < used);
  if (lane == 0) shared->absent[warp] = __popc(absent);
  if (lane == 0 && touched != 0) atomicAdd(&shared->touched, __popc(touched));
  async_wait();
  if (alone) move_rows(a, rows, a.layer.host_rows, a.host_slots + first, warp, lane);
  block_sync();

  u32 total;
  const u32 warps_before = lanes_before(lane < WARPS ? shared->absent[lane] : 0, lane, &total);
  const u32 nth = __shfl_sync(ALL_LANES, warps_before, warp) + __popc(absent & ((1u << lane) - 1));
  if (thread == 0) {
    shared->place = total == 0 ? 0 : take_names(a.layer, total);
    count_touched(a.layer, shared->touched);
    if (!alone) {
      const u32 arrived = grid_arrive(a.layer.barrier, block_index(), grid_size());
      if (total != 0) grid_wait(a.layer.barrier, arrived);
    }
  }
  if (!alone) move_rows(a, rows, a.layer.host_rows, a.host_slots + first, warp, lane);
  block_sync();  // every row that is there is protected, every place is taken

  i32 slot = found;
  bool settled = false;
  if (missing) {
    if (victim.place != shared->place + nth) victim = name_victim(a.layer, shared->place + nth);
    settled = settle(a.layer, &victim, host_slot, floor, floor);
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
  move_rows(a, rows, a.layer.device_rows, shared->slots, warp, lane);
  if (thread == 0) {
    add_total(a.layer.totals, WRITTEN, shared->written);
    add_total(a.layer.totals, EVICTED, shared->evicted);
    add_total(a.layer.totals, ALLOCATED, shared->allocated);
  }
}
