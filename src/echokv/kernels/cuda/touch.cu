// Reading a word of every page of some host memory, so that whoever reads it soon after finds its
// addresses translated. Small blocks: one word a thread, from many SMs.
#include "device.cuh"

constexpr u32 THREADS = 32;

struct TouchArguments {
  const u8* from;  // at a multiple of 16
  u64 bytes;       // at least 16
  u64 page_bytes;
};

KERNEL(32, 16) void touch_pages(ARGUMENTS TouchArguments a) {
  const u64 at = u64(block_index() * THREADS + thread_index()) * a.page_bytes;
  const u64 last = a.bytes / 16 * 16 - 16;
  if (at < last + a.page_bytes) touch_word(a.from + (at < last ? at : last));
}
