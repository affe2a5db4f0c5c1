// Fetching the rows that queries will probably select, while later queries are still scored.
//
// Rows of a pass are scored in waves. A histogram of each row's scores gives a bound above which all
// are among its k highest (`bound_of`), long before the exact top-k; what reaches the bound of any
// row of a wave and is absent is fetched once, while the next wave is scored.
//
//   scoring warps --counts--> bins (shared) --flush--> histograms (HBM) --> bounds --> ready
//                 --scores--> HBM                                                        |
//                                 fetching warps of all blocks <-------------------------+
//                                 scores, a few columns a warp --> claim, victim, copy
//
// A bin is the top 8 bits of a score less the row's shift, in the order of floats: near zero, where
// the shift expects the k-th score, bins are finest. A block adds its bins to the row's histogram
// when it is done with a run of units, then counts the units; who counts the last unit of a segment
// computes its rows' bounds, and counts the segment as ready. All are counters that only rise, each
// raised after a fence, so that who sees the last count sees the scores as well.
//
// Claims, victims and mappings are those of claims.cuh. Nobody waits for a fetching warp: when a
// block's scores are made, its warps claim nothing more, and what is left is fetched beside the
// top-k (`fetch_late`) or by the recall.
#pragma once
#include "prefetch.cuh"
#include "tiles.cuh"

constexpr u32 SCORE_BINS = 256;
constexpr u32 WAVE_ROWS = 64;   // of whole tiles, at most 2 * WARP
constexpr u32 ROTATION = 37;    // of the blocks' shares, from wave to wave: some are a unit longer
constexpr u32 COLUMNS = 128;    // that a fetching warp looks at at once: four a lane
constexpr u32 ROWS_AT_ONCE = 4;  // whose scores a lane asks for at once
// Rows that a warp claims before it looks again whether it should; an SM has two such warps. Measured with
// one: 975 instead of 942 us for 512 random queries, half of the context absent.
constexpr u32 CLAIMS_AT_ONCE = 2;
using WavePart = RowPart<WARP, 3>;  // all of 1,152 bytes
constexpr u32 NOTHING_REACHES = 0x7fc00000u;  // NaN

struct InterArguments {
  PrefetchArguments fetch;  // of which: the layer, and host_slots [most], -1 at first: the fetched
  const float* shifts;      // [requests], predicted k-th scores
  u32* histograms;          // [rows, SCORE_BINS], 0 at first
  u32* scored;              // [rows], 0 at first: units of the segment that begins there
  u32* ready;               // [waves], 0 at first: segments
  float* bounds;            // [rows] out
  u32* listed;              // [1], 0 at first: places of host_slots handed out
  const i32* block_tables;  // [requests, blocks]
  const float* scores;      // [rows, width], as they are made
  Rows rows;
  u32 blocks;
  u32 k;
};

DEVICE u32 bin_of(float score, float shift) { return order_key(float_bits(score - shift)) >> 24; }

// Rows of one wave.
DEVICE Rows wave_of(const Rows& rows, u32 wave) {
  const u32 first = wave * WAVE_ROWS;
  Rows mine = rows;
  mine.contexts.lens += first, mine.requests += first;
  mine.contexts.rows = smaller(WAVE_ROWS, rows.contexts.rows - first);
  return mine;
}
DEVICE u32 waves_of(const Rows& rows) { return ceil_div(rows.contexts.rows, WAVE_ROWS); }

// Everything that a block scores, in order: `body(work, first)`, where the work's rows are counted
// from `first` on. In waves, or all rows as one. Whole warps.
template <bool IN_WAVES, typename Body>
DEVICE void for_works(const Rows& rows, u32 block, u32 blocks, u32 lane, Body body) {
  const u32 waves = IN_WAVES ? waves_of(rows) : 1;
  u32 sequence = 0;
  for (u32 wave = 0; wave < waves; wave++) {
    const Rows mine = IN_WAVES ? wave_of(rows, wave) : rows;
    Work work = first_work(mine, (block + wave * ROTATION) % blocks, blocks, lane, sequence);
    for (; work.units != 0; next_work(mine, &work)) body(work, wave * WAVE_ROWS);
    sequence = work.sequence;
  }
}

// The least score less shift of which all that reach it are among the k highest: where the bin of
// the k-th ends. One warp, whose lanes hold eight bins each, the highest first.
DEVICE float bound_of(const u32* histogram, u32 k, u32 lane) {
  u32 counts[SCORE_BINS / WARP], sum = 0, total;
#pragma unroll
  for (u32 i = 0; i < SCORE_BINS / WARP; i++) {
    counts[i] = u32(load_shared_value(
        reinterpret_cast<const i32*>(histogram) + SCORE_BINS - 1 - lane * (SCORE_BINS / WARP) - i));
    sum += counts[i];
  }
  u32 above = lanes_before(sum, lane, &total);
  u32 bin = 0;  // 1 + that of the k-th, in the one lane that has it
#pragma unroll
  for (u32 i = 0; i < SCORE_BINS / WARP; i++) {
    if (above < k && above + counts[i] >= k) bin = SCORE_BINS - lane * (SCORE_BINS / WARP) - i;
    above += counts[i];
  }
  bin = __reduce_max_sync(ALL_LANES, bin);
  if (total < k) return bits_float(0xff800000u);  // all of them
  return bin == SCORE_BINS ? bits_float(NOTHING_REACHES) : bits_float(order_bits(bin << 24));
}

// What a run of units has counted; one warp. `bins` [rows, SCORE_BINS] are zero afterwards. `released`
// is called once they are.
template <typename Released>
DEVICE void publish(const InterArguments& a, const Work& work, u32 first_row, u32* bins, u32 lane,
                    Released released) {
  const u32 row = first_row + work.segment.row, rows = work.segment.rows;
  u32* histograms = a.histograms + u64(row) * SCORE_BINS;
  for (u32 at = lane; at < rows * SCORE_BINS; at += WARP) {
    const u32 count = bins[at];
    if (count == 0) continue;
    atomicAdd(histograms + at, count);
    bins[at] = 0;
  }
  warp_sync();
  released();
  device_fence();
  u32 before = 0;
  if (lane == 0) before = atomicAdd(a.scored + row, work.units);
  before = __shfl_sync(ALL_LANES, before, 0);
  if (before + work.units != units_of(work.segment)) return;
  device_fence();
  for (u32 i = 0; i < rows; i++) {
    const float bound = bound_of(histograms + i * SCORE_BINS, a.k, lane);
    if (lane == 0) a.bounds[row + i] = bound;
  }
  device_fence();
  if (lane == 0) atomicAdd(a.ready + row / WAVE_ROWS, 1u);
}

// Segments of a wave that have something to score. Whole warps.
DEVICE u32 live_segments(const Rows& wave, u32 lane) {
  u32 count = 0;
  for (u32 row = lane * TILE_ROWS; row < wave.contexts.rows && lane < WAVE_ROWS / TILE_ROWS;) {
    const Segment segment = segment_at(wave, row);
    count += segment.tokens != 0;
    row += segment.rows;
    if (row % TILE_ROWS == 0) break;
  }
  return __reduce_add_sync(ALL_LANES, count);
}

// What a fetching warp knows of a wave's rows.
struct WaveNotes {
  float bounds[WAVE_ROWS];
  u32 tokens[WAVE_ROWS];
};

DEVICE void note_wave(const InterArguments& a, const Rows& wave, u32 first_row, WaveNotes* notes,
                      u32 lane) {
  warp_sync();
  for (u32 row = lane; row < wave.contexts.rows; row += WARP) {
    notes->tokens[row] = tokens_of(wave.contexts, row);
    notes->bounds[row] = bits_float(
        u32(load_shared_value(reinterpret_cast<const i32*>(a.bounds + first_row + row))));
  }
  warp_sync();
}

// Rows [row, row + rows) of a wave are one request's.
DEVICE u32 rows_of_request(const Rows& wave, u32 row, u32 lane) {
  const i32 request = wave.requests[row];
  u32 rows = 0;
  for (u32 i = 0; i < 2 && rows == i * WARP; i++) {
    const u32 at = row + i * WARP + lane;
    const u32 other =
        __ballot_sync(ALL_LANES, at >= wave.contexts.rows || wave.requests[at] != request);
    rows += other == 0 ? WARP : __ffs(other) - 1;
  }
  return rows;
}

// Which of this lane's four columns some row of a request wants.
DEVICE u32 wanted_columns(const InterArguments& a, const WaveNotes* notes, u32 first_row, u32 row,
                          u32 rows, float shift, u32 column) {
  const u32 width = a.rows.contexts.width;
  if (column >= width) return 0;
  const float* scores = a.scores + u64(first_row + row) * width + column;
  u32 found = 0;
  for (u32 start = 0; start < rows; start += ROWS_AT_ONCE) {
    Words words[ROWS_AT_ONCE];
#pragma unroll
    for (u32 i = 0; i < ROWS_AT_ONCE; i++)
      if (start + i < rows) words[i] = load_others_words(scores + u64(start + i) * width);
#pragma unroll
    for (u32 i = 0; i < ROWS_AT_ONCE; i++) {
      if (start + i >= rows) break;
      const float bound = notes->bounds[row + start + i];
      const u32 tokens = notes->tokens[row + start + i];
      found |= u32(column + 0 < tokens && bits_float(words[i].x) - shift >= bound) << 0 |
               u32(column + 1 < tokens && bits_float(words[i].y) - shift >= bound) << 1 |
               u32(column + 2 < tokens && bits_float(words[i].z) - shift >= bound) << 2 |
               u32(column + 3 < tokens && bits_float(words[i].w) - shift >= bound) << 3;
    }
  }
  return found;
}

// The rows of some lanes, one after the other; the next is asked for before one is written. `first`
// is the first part of the first. A slot of -1: that row has nowhere to go.
DEVICE void copy_rows(const Layer& layer, WavePart first, i32 host_slot, i32 slot, u32 lanes,
                      u32 lane) {
  WavePart part = first;
  while (lanes != 0) {
    const u32 mine = __ffs(lanes) - 1;
    lanes &= lanes - 1;
    const i32 from = __shfl_sync(ALL_LANES, host_slot, mine);
    const i32 where = __shfl_sync(ALL_LANES, slot, mine);
    WavePart next = part;
    if (lanes != 0) {
      const i32 after = __shfl_sync(ALL_LANES, host_slot, __ffs(lanes) - 1);
      next = load_part<WavePart>(host_row(layer, after), layer.row_bytes, lane);
    }
    if (where >= 0) store_row(layer, part, from, where, lane);
    part = next;
  }
}

// Fetch the lanes' rows that are still absent, whoever leaves for them: no recall runs beside. `at` is
// where they are on the list.
DEVICE void take_in(const PrefetchArguments& a, bool wants, i32 host_slot, u32 at, i32 floor,
                    Fetched* fetched, u32 lane) {
  const Layer& layer = a.layer;
  const bool mine = wants && claim(layer, host_slot);
  const u32 claims = __ballot_sync(ALL_LANES, mine);
  if (claims == 0) return;
  // The first row is on its way while its victim is looked for.
  const i32 next = __shfl_sync(ALL_LANES, host_slot, __ffs(claims) - 1);
  const WavePart part = load_part<WavePart>(host_row(layer, next), layer.row_bytes, lane);
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

// Fetch a few of the lanes' wanted rows at a time; stops when `over` says so.
template <typename Over>
DEVICE void fetch_columns(const InterArguments& a, i32 request, u32 found, u32 column, i32 floor,
                          Fetched* fetched, u32 lane, Over over) {
  const Layer& layer = a.fetch.layer;
  i32 host_slot = NONE;
  if (found != 0)
    host_slot = a.block_tables[u64(u32(request)) * a.blocks + column / PAGE_TOKENS] *
                    i32(PAGE_TOKENS) + i32(column % PAGE_TOKENS);
  u32 absent = 0;
#pragma unroll
  for (u32 i = 0; i < 4; i++)
    if (found >> i & 1)
      absent |= u32(load_shared_value(layer.host_to_device + host_slot + i) == NONE) << i;
  while (true) {
    u32 asking = __ballot_sync(ALL_LANES, absent != 0);
    if (asking == 0 || over()) return;
    const bool mine = absent != 0 && __popc(asking & ((1u << lane) - 1)) < CLAIMS_AT_ONCE;
    asking = __ballot_sync(ALL_LANES, mine);
    u32 first = 0;
    if (lane == 0) first = atomicAdd(a.listed, u32(__popc(asking)));
    first = __shfl_sync(ALL_LANES, first, 0);
    if (first >= a.fetch.most) return;
    const u32 at = first + __popc(asking & ((1u << lane) - 1));
    const u32 which = mine ? __ffs(absent) - 1 : 0;
    if (mine) absent &= absent - 1;
    take_in(a.fetch, mine && at < a.fetch.most, host_slot + i32(which), at, floor, fetched, lane);
  }
}

// A wave's rows that are wanted and absent, this warp's columns of them.
template <typename Over>
DEVICE void fetch_wave(const InterArguments& a, u32 wave, WaveNotes* notes, u32 warp, u32 warps,
                       i32 floor, Fetched* fetched, u32 lane, Over over) {
  const Rows mine = wave_of(a.rows, wave);
  const u32 first_row = wave * WAVE_ROWS;
  note_wave(a, mine, first_row, notes, lane);
  for (u32 row = 0; row < mine.contexts.rows;) {
    const u32 rows = rows_of_request(mine, row, lane);
    const i32 request = mine.requests[row];
    u32 tokens = 0;
    for (u32 i = lane; i < rows; i += WARP)
      tokens = notes->tokens[row + i] > tokens ? notes->tokens[row + i] : tokens;
    tokens = __reduce_max_sync(ALL_LANES, tokens);
    for (u32 start = warp * COLUMNS; start < tokens; start += warps * COLUMNS) {
      if (over()) return;
      const u32 column = start + lane * 4;
      const u32 found =
          wanted_columns(a, notes, first_row, row, rows, a.shifts[request], column);
      fetch_columns(a, request, found, column, floor, fetched, lane, over);
    }
    row += rows;
  }
}

// A fetching warp: wave after wave, as they become ready.
template <typename Over>
DEVICE void fetch_waves(const InterArguments& a, WaveNotes* notes, u32 warp, u32 warps, u32 lane,
                        Over over) {
  const i32 floor = *a.fetch.layer.floor;
  Fetched fetched = {0, 0};
  const u32 waves = waves_of(a.rows);
  for (u32 wave = 0; wave < waves && !over(); wave++) {
    const u32 segments = live_segments(wave_of(a.rows, wave), lane);
    while (!over()) {
      const i32 ready = lane == 0 ? load_shared_value(reinterpret_cast<i32*>(a.ready + wave)) : 0;
      if (u32(__shfl_sync(ALL_LANES, ready, 0)) == segments) {
        device_fence();
        fetch_wave(a, wave, notes, warp, warps, floor, &fetched, lane, over);
        break;
      }
      pause();
    }
  }
  add_fetched(a.fetch, fetched, lane);
}
