// A row on its way from host memory to a warp's place in shared memory.
//
// Plain loads of host memory keep all other loads of an SM waiting, in order; bulk copies don't go
// through L1. They read over PCIe as fast only if they begin and end with a line, so the lines that
// a row lies in are brought, a few bytes more than the row. None of these is out of reach: a line
// never crosses a page.
#pragma once
#include "bulk.cuh"
#include "claims.cuh"

constexpr u32 LINE = 128;

// A warp's place: a line for the barrier, then the row's.
DEVICE constexpr u32 landing_bytes(u32 row_bytes) {
  return LINE + (row_bytes + LINE - 16 + LINE - 1) / LINE * LINE;
}

struct Landing {
  u8* place;
  u32 sent;   // rows so far
  u32 first;  // byte of the last row
};

DEVICE Landing make_landing(u8* shared, u32 row_bytes, u32 warp, u32 lane) {
  Landing landing = {shared + warp * landing_bytes(row_bytes), 0, 0};
  if (lane == 0) barrier_init(reinterpret_cast<Barrier*>(landing.place), 1);
  barrier_init_done();
  warp_sync();
  return landing;
}

// Send for a row, of whole sixteen-byte words, once all lanes are done with the one before.
DEVICE void send_for_row(Landing* landing, const u8* row, u32 row_bytes, u32 lane) {
  Barrier* barrier = reinterpret_cast<Barrier*>(landing->place);
  landing->first = u32(reinterpret_cast<u64>(row) % LINE);
  landing->sent++;
  warp_sync();
  if (lane != 0) return;
  const u32 bytes = (landing->first + row_bytes + LINE - 1) / LINE * LINE;
  barrier_arrive_expecting(barrier, bytes);
  copy_to_shared(landing->place + LINE, row - landing->first, bytes, barrier);
}

// A warp's first row, as it was sent for.
DEVICE Landing landing_of(u8* shared, const Layer& layer, u32 warp, i32 host_slot) {
  return {shared + warp * landing_bytes(layer.row_bytes), 1,
          u32(reinterpret_cast<u64>(host_row(layer, host_slot)) % LINE)};
}

// Wait for it. Where it is; all lanes may read it.
DEVICE const u8* await_row(const Landing& landing) {
  barrier_wait(reinterpret_cast<Barrier*>(landing.place), (landing.sent - 1) % 2);
  return landing.place + LINE + landing.first;
}

// Put it where it belongs; -1: nowhere.
DEVICE void land_row(const Layer& layer, const Landing& landing, i32 slot, u32 lane) {
  const u8* from = await_row(landing);
  if (slot < 0) return;
  u8* to = device_row(layer, slot);
  for (u32 at = lane * 16; at < u32(layer.row_bytes); at += WARP * 16)
    store_row_words(to + at, load_words(from + at));
}
