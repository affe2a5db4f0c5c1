// Index keys and queries as they lie in memory, and how a warpgroup gets its keys into registers.
//
// A page is 64 keys of 128 e4m3 bytes, then their float32 scales. A thread reads sixteen bytes of a
// key at a time, so it holds other bytes of it than wgmma's layout says; as the sum over a key's
// bytes has no order, `quantise_query` puts the query's bytes in the same order instead.
#pragma once
#include "schedule.cuh"

constexpr u32 DIM = 128;  // bytes of a key
constexpr u32 PAGE_BYTES = PAGE_TOKENS * (DIM + 4);
constexpr u32 MAX_HEADS = 64;
constexpr u32 MINUS_INFINITY = 0xff800000u;

// A query as it lies in memory: its bytes, then the weight of each head.
DEVICE constexpr u32 image_bytes(u32 heads) { return heads * (DIM + 4); }

// This thread's part of two keys: the bytes of the rows' halves, as `quantise_query` expects them.
// Two rows next to each other are read in one go, so they read opposite halves first: no two
// threads then want the same bank.
DEVICE void load_keys(u32 (&keys)[16], const u8* page, u32 key, u32 lane) {
  const u32 odd = key % 2, column = lane % 4 * 16;
#pragma unroll
  for (u32 i = 0; i < 2; i++) {  // rows key and key + 8
    const u8* row = page + (key + 8 * i) * DIM + column;
    const Words one = load_words(row + odd * 64), other = load_words(row + (odd ^ 1) * 64);
    const Words left = odd ? other : one, right = odd ? one : other;
    // Product j takes words 2 j and 2 j + 1 of each row.
    keys[i] = left.x, keys[2 + i] = left.y, keys[4 + i] = left.z, keys[6 + i] = left.w;
    keys[8 + i] = right.x, keys[10 + i] = right.y, keys[12 + i] = right.z, keys[14 + i] = right.w;
  }
}
