// Dividing a prefill's scores among the blocks of a persistent grid.
//
// Consecutive rows make a tile; those of a tile that belong to one request read the same keys, and
// are scored together: a segment. A unit of work is a segment against two pages of keys. Every
// block takes the same number of units, give or take one: a run of the sequence that lists tile 0's
// units, segment by segment, then tile 1's, and so on.
#pragma once
#include "schedule.cuh"

constexpr u32 TILE_ROWS = 8;
constexpr u32 UNIT_TOKENS = 2 * PAGE_TOKENS;

struct Rows {
  Contexts contexts;
  const i32* requests;  // [rows]
};

// Rows that are scored together.
struct Segment {
  u32 row, rows;  // none: past the end
  u32 tokens;     // of its longest row
};

DEVICE u32 end_of_tile(const Rows& rows, u32 row) {
  return smaller((row / TILE_ROWS + 1) * TILE_ROWS, rows.contexts.rows);
}

// The segment that begins at a row. One thread.
DEVICE Segment segment_at(const Rows& rows, u32 row) {
  const u32 end = end_of_tile(rows, row);
  Segment segment = {row, 0, 0};
  if (row >= end) return segment;
  const i32 request = rows.requests[row];
  for (; row < end && rows.requests[row] == request; row++, segment.rows++) {
    const u32 tokens = tokens_of(rows.contexts, row);
    segment.tokens = tokens > segment.tokens ? tokens : segment.tokens;
  }
  return segment;
}

DEVICE u32 units_of(const Segment& segment) { return ceil_div(segment.tokens, UNIT_TOKENS); }

DEVICE u32 units_of_tile(const Rows& rows, u32 tile) {
  u32 row = tile * TILE_ROWS, units = 0;
  if (row >= rows.contexts.rows) return 0;
  for (const u32 end = end_of_tile(rows, row); row < end;) {
    const Segment segment = segment_at(rows, row);
    units += units_of(segment);
    row += segment.rows;
  }
  return units;
}

// Units of one segment that a block takes: `for (Work work = first_work(...); work.units != 0;
// next_work(...))`. Called by whole warps; every lane gets the same. Works are numbered from
// `sequence` on.
struct Work {
  Segment segment;
  u32 unit, units;  // the first, and how many; 0: past the end
  u32 left;         // units of the block after these
  u32 sequence;     // how many works came before
};

DEVICE void find_work(const Rows& rows, Work* work) {
  work->units = 0;
  while (work->left != 0) {
    const u32 units = units_of(work->segment);
    if (units > work->unit) {
      work->units = smaller(work->left, units - work->unit);
      work->left -= work->units;
      return;
    }
    work->unit -= units;
    work->segment = segment_at(rows, work->segment.row + work->segment.rows);
  }
}

DEVICE Work first_work(const Rows& rows, u32 block, u32 blocks, u32 lane, u32 sequence = 0) {
  const u32 tiles = ceil_div(rows.contexts.rows, TILE_ROWS);
  const u32 of_first_tiles = units_of_tile(rows, lane);
  u32 mine = of_first_tiles;
  for (u32 tile = lane + WARP; tile < tiles; tile += WARP) mine += units_of_tile(rows, tile);
  const u32 total = __reduce_add_sync(ALL_LANES, mine);
  const u32 first = u32(u64(total) * block / blocks);
  const u32 last = u32(u64(total) * (block + 1) / blocks);
  Work work = {{0, 0, 0}, 0, 0, last - first, sequence};
  if (first == last) return work;
  u32 passed = 0;
  for (u32 tile = 0;; tile += WARP) {
    const u32 units = tile == 0 ? of_first_tiles : units_of_tile(rows, tile + lane);
    u32 sum;
    const u32 before = passed + lanes_before(units, lane, &sum);
    const u32 holder = __ballot_sync(ALL_LANES, before <= first && first < before + units);
    if (holder != 0) {
      const u32 from = __ffs(holder) - 1;
      work.unit = first - __shfl_sync(ALL_LANES, before, from);
      work.segment = segment_at(rows, (tile + from) * TILE_ROWS);
      find_work(rows, &work);
      return work;
    }
    passed += sum;
  }
}

DEVICE void next_work(const Rows& rows, Work* work) {
  work->unit = 0;
  work->sequence++;
  work->segment = segment_at(rows, work->segment.row + work->segment.rows);
  find_work(rows, work);
}

// Tokens that the units of a row's segment cover. Called by whole warps.
DEVICE u32 covered_tokens(const Rows& rows, u32 row, u32 lane) {
  const u32 first = row / TILE_ROWS * TILE_ROWS, mine = first + lane, end = end_of_tile(rows, row);
  const i32 request = mine < end ? rows.requests[mine] : 0;
  const i32 before = i32(__shfl_up_sync(ALL_LANES, u32(request), 1));
  const u32 starts = __ballot_sync(ALL_LANES, lane == 0 || mine >= end || request != before);
  const u32 up_to_row = (2u << (row - first)) - 1;
  const u32 begin = WARP - 1 - __clz(starts & up_to_row);
  const u32 after = __ffs(starts & ~up_to_row) - 1;  // lanes past the tile start nothing's segment
  const bool within = lane >= begin && lane < after && mine < end;
  const u32 tokens = __reduce_max_sync(ALL_LANES, within ? tokens_of(rows.contexts, mine) : 0);
  return ceil_div(tokens, UNIT_TOKENS) * UNIT_TOKENS;
}
