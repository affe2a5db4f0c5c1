// Making a selection resident.
//
// `make_resident` does lookup, eviction, allocation, mapping, copy and translation in one launch,
// and takes new rows in; contract in recall.py. A block owns the rows that its own entries miss: it
// claims them in the mapping and tells the grid that it has looked; then its warps, which share
// these rows evenly, send for the first of them, and it takes the next names off the ready list,
// while it waits for the rest of the grid, since a row that somebody else selects must not leave. One
// row or two land in shared memory, which they are sent for before the block waits.
// Blocks that have claimed nothing don't wait for the grid, only for rows that others have claimed.
// Blocks move their rows in the order of addresses, roughly: reads that all blocks do at the same
// time then share translations of addresses. What has to be in order is in order by the barrier
// alone: priorities only ever rise while a selection is made resident, so that they are raised by
// atomic maxima, and a mapping carries its whole message.
//
// New rows are the last block's: to everybody else an absent one is another's, whoever claimed it.
//
// Reads of host memory hold up all else that an SM loads through its L1 cache. Beside other kernels
// few and wide blocks therefore have SMs for themselves, by asking for all of their shared memory,
// and few of their warps move rows: enough for PCIe, and not so many that HBM feels them.
#include "entries.cuh"

constexpr u32 ROWS_OF_MOVER = 3;  // that a block's warps move, one after the other
constexpr u32 LINE_SLOTS = 32;    // priorities of a line of the L2 cache

// Count a claim among the block's; how many of its stretch were before it.
template <u32 THREADS>
DEVICE u32 count_claim(const ResidentArguments& a, RecallShared<THREADS>* shared,
                       const Entry& entry) {
  return entry.mine ? atomicAdd(&shared->claims[u32(entry.host_slot) / a.stretch], 1u) : 0;
}

// When all are counted: put a claim where it belongs. How many the block has.
template <u32 THREADS>
DEVICE u32 place_claim(const ResidentArguments& a, RecallShared<THREADS>* shared,
                       const Entry& entry, u32* at, u32 lane) {
  u32 claims;
  const u32 before = lanes_before(shared->claims[lane], lane, &claims);
  *at += __shfl_sync(ALL_LANES, before, entry.mine ? u32(entry.host_slot) / a.stretch : 0);
  if (entry.mine) shared->host_slots[*at] = entry.host_slot;
  return claims;
}

// Whether a warp can have a whole row in its registers.
DEVICE bool fits_registers(const ResidentArguments& a) {
  return a.words_of_16 && u32(a.layer.row_bytes) <= WORDS_HELD * 16;
}

// How many warps move a block's claims: a few rows each, whatever `movers` leaves of them.
template <u32 THREADS>
DEVICE u32 moving_warps(const ResidentArguments& a, u32 claims) {
  const u32 wanted = ceil_div(claims, ROWS_OF_MOVER), least = a.movers;
  return smaller(wanted > least ? wanted : least, THREADS / WARP);
}

// Move the block's claims, every movers-th by a warp; it may have its first row in hand, in `held`.
template <u32 THREADS>
DEVICE void move_claims(const ResidentArguments& a, const RecallShared<THREADS>* shared,
                        u32 claims, const RowWords& held, bool has_first, u32 warp, u32 lane) {
  const u32 row_bytes = a.layer.row_bytes, movers = moving_warps<THREADS>(a, claims);
  if (warp >= movers) return;
  for (u32 at = warp; at < claims; at += movers) {
    const i32 slot = shared->device_slots[at];
    if (slot < 0) continue;
    u8* to = device_row(a.layer, slot);
    if (has_first && at == warp)
      store_row(to, held, row_bytes / 16, lane);
    else
      copy_row(to, host_row(a.layer, shared->host_slots[at]), row_bytes, a.words_of_16, lane);
  }
}

// A block's tiles: every step-th.
struct Tiles {
  u32 first, last, step;
};

// Give slots to what the block has claimed, when the grid has looked, and move the rows. `mine` is
// of the first tile, and `at` how many claims of its stretch were before it.
template <u32 THREADS, bool ONE_TILE>
DEVICE void bring_claims(const ResidentArguments& a, RecallShared<THREADS>* shared,
                         const Tiles& tiles, Entry mine, u32 at, u32 arrived,
                         const ReadyList& list, i32 floor, u32 thread) {
  const u32 lane = thread % WARP, warp = thread / WARP;
  u32 claims = place_claim(a, shared, mine, &at, lane);
  if (thread == WARP && claims != 0) shared->place = take_names(a.layer, claims);
  block_sync();
  // By bulk copies, past which all other loads go; where there are many, names would wait for PCIe.
  const bool few = ONE_TILE && a.landings != 0 && claims <= FEW_ROWS;
  if (few && warp < claims) {
    Landing landing = make_landing(shared_memory() + a.landings, a.layer.row_bytes, warp, lane);
    send_for_row(&landing, host_row(a.layer, shared->host_slots[warp]), a.layer.row_bytes, lane);
  }
  if (mine.mine) mine.victim = name_victim(a.layer, list, shared->place + at);
  if (thread == 0) grid_wait(a.layer.barrier, arrived);
  // From now on other loads wait behind those of rows.
  RowWords held = {};  // of the first row that this warp moves, on its way meanwhile
  const bool ahead =
      !few && fits_registers(a) && warp < smaller(claims, moving_warps<THREADS>(a, claims));
  if (ahead)
    held = load_row(host_row(a.layer, shared->host_slots[warp]), a.layer.row_bytes / 16, lane);
  block_sync();

  for (u32 tile = tiles.first; tile < tiles.last; tile += tiles.step) {
    const bool first = ONE_TILE || tile == tiles.first;
    Entry entry = mine;
    if (!first) {
      block_sync();  // the claims before are moved
      if (thread < STRETCHES) shared->claims[thread] = 0;
      block_sync();
      entry = unpack<THREADS>(a, list, tile, thread, floor);
      at = count_claim(a, shared, entry);
      block_sync();
      claims = place_claim(a, shared, entry, &at, lane);
    }
    const bool settled =
        entry.mine && settle(a.layer, list, &entry.victim, entry.host_slot, entry.level);
    if (entry.mine) a.device_slots[entry.index] = shared->device_slots[at] = entry.victim.slot;
    const u32 recalled = __popc(__ballot_sync(ALL_LANES, entry.mine));
    const u32 allocated = __popc(__ballot_sync(ALL_LANES, settled));
    const u32 evicted = __popc(__ballot_sync(ALL_LANES, settled && entry.victim.owner >= 0));
    if (lane == 0 && recalled != 0) {
      atomicAdd(&shared->recalled, recalled);
      atomicAdd(&shared->allocated, allocated);
      atomicAdd(&shared->evicted, evicted);
    }
    block_sync();
    if (!first || !few)
      move_claims(a, shared, claims, held, first && ahead, warp, lane);
    else if (warp < claims)
      land_row(a.layer, landing_of(shared_memory() + a.landings, a.layer, warp,
                                   shared->host_slots[warp]),
               shared->device_slots[warp], lane);
  }
  if (thread == 0) {
    add_total(a.layer.totals, RECALLED, shared->recalled);
    add_total(a.layer.totals, EVICTED, shared->evicted);
    add_total(a.layer.totals, ALLOCATED, shared->allocated);
  }
}

// ONE_TILE: a block has no other.
template <u32 THREADS, bool ONE_TILE>
DEVICE void make_tiles_resident(const ResidentArguments& a) {
  RecallShared<THREADS>* shared = reinterpret_cast<RecallShared<THREADS>*>(shared_memory());
  const u32 thread = thread_index(), lane = thread % WARP;
  const u32 block = block_index(), blocks = grid_size() - (a.new_rows.count != 0 ? 1 : 0);
  wait_for_previous();
  let_next_start();
  if (block == blocks) return append_block<THREADS>(a.layer, a.new_rows, 0, false);
  const Tiles tiles = {block, ONE_TILE ? block + 1 : u32(a.tiles), blocks};
  // Most of the priorities' lines will be wanted when the lookups are done.
  const u32 line = (block * THREADS + thread) * LINE_SLOTS;
  if (line < u32(a.layer.slots)) fetch_line(a.layer.priority + line);
  const i32 floor = *a.layer.floor;
  const ReadyList list = ready_list(a.layer, floor);
  const NewSlots new_slots = load_new_slots(a, lane);
  if (thread < STRETCHES) shared->claims[thread] = 0;
  if (thread == 0) {
    shared->hits = shared->touched = 0;
    shared->recalled = shared->evicted = shared->allocated = 0;
  }

  Entry mine = {};
  i32 where = NONE;  // `mine` is, when it was looked up
  u32 at = 0;        // among the block's claims
  bool claimed = false, follows = false;
  for (u32 tile = block; tile < tiles.last; tile += blocks) {
    Entry entry = entry_of<THREADS>(a, tile, thread);
    const float score = entry.index != ALL_LANES ? a.scores[entry.index] : 0;
    const Extremes extremes = extremes_of_row<THREADS>(a, tile / a.tiles_per_row, thread);
    const i32 found =
        entry.host_slot >= 0 ? load_shared_value(a.layer.host_to_device + entry.host_slot) : NONE;
    if (!ONE_TILE && tile != block) block_sync();  // the row before is read
    // Nothing before this needs `found`, which is on its way meanwhile.
    entry.level = floor + level_of(score, range_of_row<THREADS>(extremes, shared, thread));
    claim_entry(a, &entry, found, new_slots);
    protect(a, entry, found, floor, list.used, shared, lane);
    claimed = claimed || entry.mine;
    follows = follows || (entry.missing && !entry.mine);
    if (ONE_TILE || tile == block) {
      mine = entry;
      where = found;
      at = count_claim(a, shared, entry);
    } else {
      take_places(a, &entry, __ballot_sync(ALL_LANES, entry.mine), lane);
      say_where(a, entry, found);
      if (entry.missing)
        a.device_slots[entry.index] = pack(
            entry.mine ? entry.victim.place : entry.appended ? NEW : LATE, entry.level, floor);
    }
  }

  claimed = block_any(claimed);
  u32 arrived = 0;
  if (thread == 0) arrived = grid_arrive(a.layer.barrier, block, grid_size());
  // All that needn't be seen by those who wait comes after the arrival.
  say_where(a, mine, where);
  if (thread == 0) {
    add_total(a.layer.totals, HITS, shared->hits);
    count_touched(a.layer, shared->touched);
  }
  if (claimed)
    bring_claims<THREADS, ONE_TILE>(a, shared, tiles, mine, at, arrived, list, floor, thread);
  if (!__any_sync(ALL_LANES, follows)) return;
  for (u32 tile = block; tile < tiles.last; tile += blocks) {
    const Entry entry =
        ONE_TILE || tile == block ? mine : unpack<THREADS>(a, list, tile, thread, floor);
    follow(a, entry, floor, lane);
  }
}

KERNEL(RECALL_THREADS, 2) void make_resident(ARGUMENTS ResidentArguments a) {
  make_tiles_resident<RECALL_THREADS, true>(a);
}
KERNEL(RECALL_THREADS, 2) void make_many_resident(ARGUMENTS ResidentArguments a) {
  make_tiles_resident<RECALL_THREADS, false>(a);
}
// The same, each block with an SM for itself.
KERNEL(WIDE_THREADS, 1) void make_resident_beside(ARGUMENTS ResidentArguments a) {
  make_tiles_resident<WIDE_THREADS, true>(a);
}
KERNEL(WIDE_THREADS, 1) void make_many_resident_beside(ARGUMENTS ResidentArguments a) {
  make_tiles_resident<WIDE_THREADS, false>(a);
}

// Copying alone: one warp a row, over as many rows as there turn out to be.
struct GatherArguments {
  const i32* host_slots;   // [entries]
  const i32* count;        // [1]
  const i32* slot_buffer;  // [entries], -1 for none
  const u8* host_rows;
  u8* device_rows;
  i32 row_bytes;
  i32 words_of_16;
};

KERNEL(RECALL_THREADS, 2) void gather_rows(ARGUMENTS GatherArguments a) {
  constexpr u32 WARPS = RECALL_THREADS / WARP;
  const u32 lane = thread_index() % WARP, warps = grid_size() * WARPS;
  const u32 count = *a.count;
  for (u32 at = thread_index() / WARP * grid_size() + block_index(); at < count; at += warps) {
    const i32 slot = a.slot_buffer[at], host_slot = a.host_slots[at];
    if (slot < 0) continue;
    copy_row(a.device_rows + u64(slot) * a.row_bytes, a.host_rows + u64(host_slot) * a.row_bytes,
             a.row_bytes, a.words_of_16, lane);
  }
}
