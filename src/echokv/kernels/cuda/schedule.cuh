// Dividing the pages of all rows among the blocks of a persistent grid.
//
// Every block takes the same number of pages, give or take one: a run of the sequence that lists
// row 0's pages, then row 1's, and so on. It depends only on the lengths, which no CPU need know.
#pragma once
#include "device.cuh"

constexpr u32 PAGE_TOKENS = 64;

struct Contexts {
  const i32* lens;  // [rows]; 0 or less is a padding row
  u32 rows;
  u32 width;  // no row counts for more tokens
};

DEVICE u32 tokens_of(const Contexts& contexts, u32 row) {
  const i32 length = contexts.lens[row];
  return length < 0 ? 0 : smaller(length, contexts.width);
}

struct Share {
  u32 row, page;  // its first page
  u32 pages;
};

DEVICE u32 pages_of_lane(const Contexts& contexts, u32 row) {
  return row < contexts.rows ? ceil_div(tokens_of(contexts, row), PAGE_TOKENS) : 0;
}

// A block's share. Called by whole warps; every lane gets it.
DEVICE Share share_of(const Contexts& contexts, u32 block, u32 blocks, u32 lane) {
  const u32 of_first_rows = pages_of_lane(contexts, lane);
  u32 mine = of_first_rows;
#pragma unroll 4
  for (u32 row = lane + WARP; row < contexts.rows; row += WARP)
    mine += pages_of_lane(contexts, row);
  const u32 total = __reduce_add_sync(ALL_LANES, mine);
  const u32 first = u32(u64(total) * block / blocks);
  const u32 last = u32(u64(total) * (block + 1) / blocks);
  Share share = {0, 0, last - first};
  if (first == last) return share;
  u32 passed = 0;
  for (u32 row = 0;; row += WARP) {
    const u32 pages = row == 0 ? of_first_rows : pages_of_lane(contexts, row + lane);
    u32 sum;
    const u32 before = passed + lanes_before(pages, lane, &sum);
    const u32 holder = __ballot_sync(ALL_LANES, before <= first && first < before + pages);
    if (holder != 0) {
      const u32 from = __ffs(holder) - 1;
      share.row = row + from;
      share.page = first - __shfl_sync(ALL_LANES, before, from);
      return share;
    }
    passed += sum;
  }
}

// The runs of a share, each of one row: `for (Run run = first_run(...); run.pages; next_run(...))`.
struct Run {
  u32 row, page, pages;  // none: past the end
  u32 tokens;            // of the row
  u32 left;              // pages of the share after this run
  u32 sequence;          // how many runs came before
};

DEVICE void find_run(const Contexts& contexts, Run* run) {
  run->pages = 0;
  for (; run->left != 0; run->row++, run->page = 0) {
    run->tokens = tokens_of(contexts, run->row);
    const u32 pages = ceil_div(run->tokens, PAGE_TOKENS);
    if (pages <= run->page) continue;
    run->pages = smaller(run->left, pages - run->page);
    run->left -= run->pages;
    return;
  }
}

DEVICE Run first_run(const Contexts& contexts, const Share& share) {
  Run run = {share.row, share.page, 0, 0, share.pages, 0};
  find_run(contexts, &run);
  return run;
}

DEVICE void next_run(const Contexts& contexts, Run* run) {
  run->row++;
  run->page = 0;
  run->sequence++;
  find_run(contexts, run);
}
