// Exact top-k of a row by one cluster of thread blocks; contract in kernels/reference/topk.py.
//
// The common way reads a row once (topk_lists.cuh). Rows for which its lists turn out too long or
// too short go the sure way (topk_digits.cuh).
#include "topk_digits.cuh"
#include "topk_lists.cuh"

DEVICE u32 log_blocks() { return WARP - 1 - __clz(cluster_size()); }  // a power of two, always

// This block's part of a row of so many scores: rows are shorter than they may get, and each is
// split evenly as it is.
DEVICE Part part_of(const TopkArguments& a, u32 row, u32 length, u32 thread) {
  const u32 blocks = cluster_size(), warp = thread / WARP;
  const u32 chunk = ceil_div((length + blocks - 1) >> log_blocks(), 4) * 4;
  const u32 begin = smaller(cluster_rank() * chunk, length), size = smaller(chunk, length - begin);
  const float* scores = a.scores + u64(row) * a.width + begin;
  const u32 groups = ceil_div(size, GROUP), each = ceil_div(groups, WARPS);
  Part part = {scores,
               reinterpret_cast<TopkShared*>(shared_memory())->keys,
               begin,
               size,
               smaller(a.cached, ceil_div(size, 4) * 4),
               reinterpret_cast<u64>(scores) % 16 == 0,
               0,
               0};
  part.first = smaller(warp * each, groups);
  part.last = smaller(part.first + each, groups);
  return part;
}

DEVICE u32 length_of(i32 context, i32 width) { return context < 0 ? 0 : smaller(context, width); }

// Entry `at` of a row that is chosen whole.
DEVICE void write_all(const TopkArguments& a, u32 row, u32 at, bool present) {
  const u64 entry = u64(row) * a.k + at;
  a.positions[entry] = present ? i32(at) : -1;
  if (a.names.host_slots == nullptr) return;
  const i32 tokens = BLOCK_TOKENS, block = present ? blocks_of(a, row)[at / BLOCK_TOKENS] : 0;
  a.names.host_slots[entry] = present ? block * tokens + i32(at % BLOCK_TOKENS) : -1;
  a.names.scores[entry] = present ? a.scores[u64(row) * a.width + at] : bits_float(0xff800000u);
}

KERNEL(TOPK_THREADS, 2) void topk(ARGUMENTS TopkArguments arguments) {
  const TopkArguments& a = arguments;
  const u32 thread = thread_index(), blocks = cluster_size(), rank = cluster_rank();
  const u32 k = a.k, row = block_index() >> log_blocks();
  if (a.listed != 0) clear_lists(a, thread);
  wait_for_previous();
  const i32 context = a.context_lens[row];
  const i32 request_row = a.names.host_slots == nullptr ? 0 : a.names.request_rows[row];
  const u32 length = length_of(context, a.width);
  if (length < k) {  // everything is chosen; the same in the whole cluster
    for (u32 at = rank * THREADS + thread; at < k; at += blocks * THREADS)
      write_all(a, row, at, at < length);
    if (rank == 0 && thread == 0) a.kth[row] = bits_float(0xff800000u);
    return;
  }
  if (a.listed != 0 && topk_by_lists(a, part_of(a, row, length, thread), row, length, request_row,
                                     thread))
    return;
  // Read again, lest what follows from it takes registers from the common way.
  const u32 same = length_of(load_shared_value(a.context_lens + row), a.width);
  topk_by_digits(a, part_of(a, row, same, thread), row, thread);
}
