// What the kernels of this folder share: names for the instructions that CUDA C++ has no word for.
//
// No torch or CUDA header is included: NVRTC compiles this as it is. With ECHOKV_EMULATE defined,
// tests/kernels/emulate.h stands in for the hardware, and g++ compiles the same kernels.
#pragma once

typedef unsigned char u8;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

constexpr u32 WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

#ifdef ECHOKV_EMULATE
#include "emulate.h"
#else

struct Words {  // sixteen bytes
  u32 x, y, z, w;
};

#define KERNEL(threads, blocks_per_sm) \
  extern "C" __global__ __launch_bounds__(threads, blocks_per_sm)
#define ARGUMENTS const __grid_constant__
#define DEVICE static __device__ __forceinline__

DEVICE u8* shared_memory() {
  extern __shared__ __align__(128) u8 bytes[];
  return bytes;
}

DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_index() { return blockIdx.x; }
DEVICE u32 grid_size() { return gridDim.x; }
DEVICE void block_sync() { __syncthreads(); }
DEVICE bool block_any(bool flag) { return __syncthreads_or(flag); }

// A kernel launched with `early=True` may start before the one ahead of it on the stream has ended,
// and touches nothing until this returns: then all of that one's work can be seen.
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The kernel behind may start from now on, if it was launched so.
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Into the L2 cache, for a load to come.
DEVICE void fetch_line(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Thread block clusters: blocks that run together and can reach each other's shared memory.
DEVICE u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
DEVICE u32 cluster_size() {
  u32 size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
template <typename T>
DEVICE T* peer(T* mine, u32 rank) {  // the same place in another block's shared memory
  u64 theirs;
  asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(mine), "r"(rank));
  return reinterpret_cast<T*>(theirs);
}

// Loads and stores that other blocks of the same kernel may race with; none goes through L1.
DEVICE i32 load_shared_value(const i32* from) {
  i32 value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
// Nobody waits for these: what comes after one may be seen before it, unless a fence stands between.
DEVICE void raise_shared_value(i32* to, i32 value) { atomicMax(to, value); }
DEVICE void store_shared_value(i32* to, i32 value) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// What others of the same kernel have written: not through L1, which may hold what was there before.
DEVICE Words load_others_words(const void* from) {
  Words words;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from)
               : "memory");
  return words;
}
DEVICE void device_fence() { __threadfence(); }

// The same within a block, in shared memory: what was written before a store is seen after a load.
DEVICE u32 load_from_block(const u32* from) {
  u32 value;
  asm volatile("ld.acquire.cta.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
DEVICE void store_to_block(u32* to, u32 value) {
  asm volatile("st.release.cta.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
DEVICE void warp_sync() { __syncwarp(); }
DEVICE void pause() { __nanosleep(256); }

// Sixteen bytes that a block of another kernel may be reading: seen as a whole or not at all.
DEVICE void store_whole(void* to, Words words) {
  asm volatile(
      "{\n"
      ".reg .b64 low, high;\n"
      ".reg .b128 all;\n"
      "mov.b64 low, {%1, %2};\n"
      "mov.b64 high, {%3, %4};\n"
      "mov.b128 all, {low, high};\n"
      "st.relaxed.gpu.global.b128 [%0], all;\n"
      "}\n" ::"l"(to),
      "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
      : "memory");
}
DEVICE Words load_whole(const void* from) {
  Words words;
  asm volatile(
      "{\n"
      ".reg .b64 low, high;\n"
      ".reg .b128 all;\n"
      "ld.relaxed.gpu.global.b128 all, [%4];\n"
      "mov.b128 {low, high}, all;\n"
      "mov.b64 {%0, %1}, low;\n"
      "mov.b64 {%2, %3}, high;\n"
      "}\n"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "l"(from)
      : "memory");
  return words;
}
DEVICE u64 nanoseconds() {  // since whenever
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Rows: read once, from host memory, and never through the read-only path. Volatile, so that a
// row is on its way before the code after it runs.
DEVICE Words load_row_words(const void* from) {
  Words words;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from));
  return words;
}
DEVICE void store_row_words(void* to, Words words) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
}

// The same without a register in between: to shared memory, there once async_wait() returns.
DEVICE void copy_async(void* to_shared, const void* from) {
  const u32 to = u32(__cvta_generic_to_shared(to_shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void copy_word_async(void* to_shared, const void* from) {
  const u32 to = u32(__cvta_generic_to_shared(to_shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Sixteen bytes of an aligned global or shared address.
DEVICE Words load_words(const void* from) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  return {words.x, words.y, words.z, words.w};
}
DEVICE void store_words(void* to, Words words) {
  *reinterpret_cast<uint4*>(to) = make_uint4(words.x, words.y, words.z, words.w);
}

DEVICE u32 float_bits(float value) { return __float_as_uint(value); }
DEVICE float bits_float(u32 bits) { return __uint_as_float(bits); }

// A one-shot barrier over the grid, of which only those who must wait do. The counter's top bit
// flips when all have arrived: block 0 adds what the others leave to 2^31, so nothing is reset.
// It publishes nothing: what those who wait look at must have been changed by atomics that have
// returned, and so been done where all blocks look (a fence would cost 0.4 us of some six).
DEVICE u32 grid_arrive(u32* counter, u32 block, u32 blocks) {
  return atomicAdd(counter, block == 0 ? 0x80000000u - (blocks - 1) : 1u);
}
DEVICE void grid_wait(u32* counter, u32 before) {
  u32 now;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  } while (((now ^ before) >> 31) == 0);
}
#endif

// Scores as unsigned keys of the same order: -0.0 as 0.0, NaN as -inf. Every key exceeds 0, which
// stands for "no score".
DEVICE u32 order_key(u32 bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0xff800000u;
  if (bits == 0x80000000u) bits = 0;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
DEVICE u32 order_bits(u32 key) { return key >> 31 ? key & 0x7fffffffu : ~key; }

DEVICE u32 smaller(u32 a, u32 b) { return a < b ? a : b; }
DEVICE u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }

// Sum over the lanes before this one, and over all of them.
DEVICE u32 lanes_before(u32 value, u32 lane, u32* total) {
  u32 sum = value;
  for (u32 step = 1; step < WARP; step *= 2) {
    const u32 other = __shfl_up_sync(ALL_LANES, sum, step);
    if (lane >= step) sum += other;
  }
  *total = __shfl_sync(ALL_LANES, sum, WARP - 1);
  return sum - value;
}
