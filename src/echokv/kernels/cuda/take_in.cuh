// Rows that a warp's lanes claim, and that it then copies in turn by plain loads; for kernels that
// nobody who makes rows resident runs beside.
#pragma once
#include "prefetch.cuh"

constexpr u32 WORDS_IN_FLIGHT = 3;  // of sixteen bytes, a lane

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
    const ReadyList list = ready_list(layer, floor);
    victim = name_victim(layer, list, first + __popc(claims & ((1u << lane) - 1)));
    settled = settle(layer, list, &victim, host_slot, floor);
    if (settled) a.host_slots[at] = host_slot;
  }
  fetched->evicted += __popc(__ballot_sync(ALL_LANES, settled && victim.owner >= 0));
  fetched->rows += __popc(__ballot_sync(ALL_LANES, settled));
  copy_rows(layer, part, host_slot, victim.slot, claims, lane);
}
