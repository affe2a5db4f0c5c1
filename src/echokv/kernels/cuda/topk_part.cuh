// What a block of a cluster has of its row, and how it reads it; for topk.cu.
#pragma once
#include "device.cuh"

#ifndef TOPK_THREADS
#define TOPK_THREADS 512
#endif
constexpr u32 THREADS = TOPK_THREADS;
constexpr u32 WARPS = THREADS / WARP;
constexpr u32 MAX_CLUSTER = 16;
constexpr u32 GROUP = 4 * WARP;  // keys that a warp looks at at once

// What attention's side of the cache calls the chosen ones.
struct Names {
  const i32* request_rows;  // [rows]: each row's row of block_tables
  const i32* block_tables;  // [requests, num_blocks]
  i32* host_slots;          // [rows, k] out; null: rows aren't named
  float* scores;            // [rows, k] out
  i64 num_blocks;
};

struct TopkArguments {
  const float* scores;      // [rows, width]
  const i32* context_lens;  // [rows]
  i32* positions;           // [rows, k] out
  float* kth;               // [rows] out
  Names names;
  i32 width;
  i32 k;
  i32 chunk;    // most scores of a row that a block looks at, a multiple of 4
  i32 cached;   // of those, how many the sure way keeps, a multiple of 4
  i32 listed;   // most keys of the lists together, at least THREADS; 0: only the sure way
  float quads_a_score;  // samples of a thread, in fours, for each score of a row
};

constexpr u32 BLOCK_TOKENS = 64;     // memory/slots.py
constexpr u32 LOWEST = 0x007fffffu;  // key of -inf and NaN
constexpr u32 ZERO = 0x80000000u;    // key of 0.0 and -0.0

// A block's part of a row, and the groups of it that this warp looks at.
struct Part {
  const float* scores;  // its first
  u32* keys;
  u32 begin;  // where in the row
  u32 size;
  u32 cached;
  bool aligned;  // to sixteen bytes
  u32 first, last;
};

DEVICE Words read_scores(const Part& part, u32 at) {  // bits; 0xffffffff, a NaN, past the end
  if (part.aligned && at + 4 <= part.size) return load_words(part.scores + at);
  const u32* bits = reinterpret_cast<const u32*>(part.scores);
  Words words = {ALL_LANES, ALL_LANES, ALL_LANES, ALL_LANES};
  if (at < part.size) words.x = bits[at];
  if (at + 1 < part.size) words.y = bits[at + 1];
  if (at + 2 < part.size) words.z = bits[at + 2];
  if (at + 3 < part.size) words.w = bits[at + 3];
  return words;
}

DEVICE Words to_keys(const Part& part, u32 at, Words bits) {  // 0 past the end
  Words keys;
  keys.x = at < part.size ? order_key(bits.x) : 0;
  keys.y = at + 1 < part.size ? order_key(bits.y) : 0;
  keys.z = at + 2 < part.size ? order_key(bits.z) : 0;
  keys.w = at + 3 < part.size ? order_key(bits.w) : 0;
  return keys;
}

// The row's host blocks.
DEVICE const i32* blocks_of(const TopkArguments& a, u32 row) {
  return a.names.block_tables + a.names.request_rows[row] * a.names.num_blocks;
}

// Entry `at` of a row's k is this position, of this key, in this host block (looked at if named).
DEVICE void write_chosen(const TopkArguments& a, u32 row, u32 at, u32 position, u32 key,
                         const i32* block) {
  const u64 entry = u64(row) * a.k + at;
  a.positions[entry] = position;
  if (a.names.host_slots == nullptr) return;
  a.names.host_slots[entry] = *block * i32(BLOCK_TOKENS) + i32(position % BLOCK_TOKENS);
  const bool many = key == LOWEST || key == ZERO;  // of these keys there are several scores
  a.names.scores[entry] =
      many ? a.scores[u64(row) * a.width + position] : bits_float(order_bits(key));
}
