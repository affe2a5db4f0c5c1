// A row's bytes, moved by a warp. Rows made of sixteen-byte words at such addresses go through
// registers, up to a length all of a row at once; others byte by byte.
//
// Plain loads, not cp.async or bulk copies: those read rows of 656 B over PCIe more slowly.
#pragma once
#include "device.cuh"

constexpr u32 WORDS_PER_LANE = 3;  // of sixteen bytes
constexpr u32 WORDS_HELD = WORDS_PER_LANE * WARP;

struct RowWords {
  Words words[WORDS_PER_LANE];
};

DEVICE RowWords load_row(const u8* from, u32 words, u32 lane) {
  RowWords row;
#pragma unroll
  for (u32 i = 0; i < WORDS_PER_LANE; i++) {
    row.words[i] = {0, 0, 0, 0};
    if (lane + i * WARP < words) row.words[i] = load_row_words(from + (lane + i * WARP) * 16);
  }
  return row;
}

DEVICE void store_row(u8* to, const RowWords& row, u32 words, u32 lane) {
#pragma unroll
  for (u32 i = 0; i < WORDS_PER_LANE; i++)
    if (lane + i * WARP < words) store_row_words(to + (lane + i * WARP) * 16, row.words[i]);
}

DEVICE void copy_row(u8* to, const u8* from, u32 row_bytes, bool words_of_16, u32 lane) {
  if (words_of_16) {
    for (u32 at = 0; at < row_bytes; at += WORDS_HELD * 16) {
      const u32 words = smaller((row_bytes - at) / 16, WORDS_HELD);
      store_row(to + at, load_row(from + at, words, lane), words, lane);
    }
    return;
  }
  for (u32 at = lane; at < row_bytes; at += WARP) to[at] = from[at];
}
