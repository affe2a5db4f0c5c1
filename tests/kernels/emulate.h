// CUDA on one CPU thread, for tests: every CUDA thread is a fiber, and a random one runs next.
//
// Stands in for the hardware half of kernels/cuda/device.cuh. Fibers change at barriers, warp
// operations and accesses to memory that blocks race on, so random seeds explore interleavings;
// memory itself is sequentially consistent here, which the hardware's is not.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define KERNEL(threads, blocks_per_sm) static
#define ARGUMENTS const
#define DEVICE static inline

struct alignas(16) Words {
  u32 x, y, z, w;
};

namespace emulated {
constexpr size_t STACK = 64 << 10;
constexpr size_t GUARD = 4096;  // bytes past shared memory that nobody may write
constexpr u8 POISON = 0xdb;
constexpr u32 SELDOM = 16;  // how much less often a slow block runs

struct Warp {
  u64 slot[2][32];
  u32 arrived[2] = {0, 0}, left[2] = {0, 0};
};
struct Barrier {
  u32 arrived = 0, generation = 0, flags[2] = {0, 0};
};
struct Block {
  std::vector<u8> shared;
  Barrier barrier;
  std::vector<Warp> warps;
  u32 running = 0;
};
struct Cluster {
  Barrier barrier;
  u32 running = 0;
};
// A store, or a maximum that nobody waits for, that others don't see yet.
struct Late {
  i32* to;
  i32 value;
  bool raises;
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  std::vector<Late> late;
  u32 thread, block;
  u32 operations = 0, cluster_target = 0;
  bool done = false;
};

struct Grid {
  u32 blocks, threads, cluster;
  std::vector<Block> block;
  std::vector<Cluster> clusters;
  std::vector<Fiber> fibers;
  std::function<void()> body;
  std::mt19937 random;
  ucontext_t scheduler;
  Fiber* now = nullptr;
  u64 tick = 0, ticks = 0;  // what the clock says, and by how much more each time
  u32 first;  // block of a second kernel that runs at the same time
};
inline Grid* grid = nullptr;

inline void yield() { swapcontext(&grid->now->context, &grid->scheduler); }
inline void maybe_yield() {
  if (grid->random() % 4 == 0) yield();
}

// Let what a thread has done to an address be seen, in its order.
inline void land(Fiber& fiber, const i32* to) {
  for (size_t i = 0; i < fiber.late.size();) {
    const Late one = fiber.late[i];
    if (one.to != to) {
      i++;
      continue;
    }
    *one.to = one.raises ? std::max(*one.to, one.value) : one.value;
    fiber.late.erase(fiber.late.begin() + i);
  }
}
inline void land_all() {
  while (!grid->now->late.empty()) land(*grid->now, grid->now->late[0].to);
}
inline void land_own(const void* to) { land(*grid->now, static_cast<const i32*>(to)); }
inline void do_late(Late one) {
  grid->now->late.push_back(one);
  maybe_yield();
}

inline Block& block() { return grid->block[grid->now->block]; }
inline u32 lane() { return grid->now->thread % 32; }

inline void entry() {
  grid->body();
  land_all();
  grid->now->done = true;
  grid->block[grid->now->block].running--;
  yield();
}

// All lanes of the warp bring a value; each gets everybody's.
inline const u64* meet(u64 value) {
  Warp& warp = block().warps[grid->now->thread / 32];
  const u32 side = grid->now->operations++ % 2;
  while (warp.arrived[side] == 32) yield();  // the meeting before the last is not over
  warp.slot[side][lane()] = value;
  warp.arrived[side]++;
  while (warp.arrived[side] != 32) yield();
  static thread_local u64 copies[32];
  std::copy(warp.slot[side], warp.slot[side] + 32, copies);
  if (++warp.left[side] == 32) warp.arrived[side] = warp.left[side] = 0;
  return copies;
}

inline bool block_barrier(bool flag) {
  Barrier& barrier = block().barrier;
  const u32 generation = barrier.generation;
  barrier.flags[generation % 2] |= flag;
  if (++barrier.arrived == grid->threads) {
    barrier.arrived = 0;
    barrier.generation++;
    barrier.flags[barrier.generation % 2] = 0;
    return barrier.flags[generation % 2];
  }
  while (barrier.generation == generation) yield();
  return barrier.flags[generation % 2];
}

inline void launch(u32 blocks, u32 threads, u32 cluster, size_t shared, u32 seed,
                   std::function<void()> body, u64 tick = 0, u32 first = ~0u) {
  Grid mine;
  mine.tick = tick;
  mine.first = first < blocks ? first : blocks;
  mine.blocks = blocks, mine.threads = threads, mine.cluster = cluster;
  mine.body = body;
  mine.random.seed(seed);
  mine.block.resize(blocks);
  mine.clusters.resize(blocks / cluster);
  mine.fibers.resize(size_t(blocks) * threads);
  grid = &mine;
  for (Block& one : mine.block) {
    one.shared.resize(shared + 16 + GUARD, POISON);
    one.warps.resize(threads / 32);
    one.running = threads;
  }
  for (size_t i = 0; i < mine.fibers.size(); i++) {
    Fiber& fiber = mine.fibers[i];
    fiber.thread = i % threads, fiber.block = i / threads;
    fiber.stack.reset(new char[STACK]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(entry), 0);
  }
  // Warps are picked at random, lanes of a warp in random order: cheap, and races still happen. In
  // every other launch there is a block that all others get far ahead of.
  const u32 slow = mine.random() % (2 * blocks);
  const u32 delay = mine.random() % 2 == 0 ? SELDOM : SELDOM * SELDOM;
  std::vector<u32> warps(mine.fibers.size() / 32);
  for (u32 i = 0; i < warps.size(); i++) warps[i] = i;
  while (!warps.empty()) {
    const u32 at = mine.random() % warps.size(), warp = warps[at], skew = mine.random();
    if (mine.fibers[warp * 32].block == slow && (skew >> 8) % SELDOM != 0) continue;
    bool alive = false;
    for (u32 i = 0; i < 32; i++) {
      Fiber& fiber = mine.fibers[warp * 32 + ((i * 5 + skew) % 32)];
      if (fiber.done) continue;
      mine.now = &fiber;
      if (!fiber.late.empty() && mine.random() % delay == 0)
        land(fiber, fiber.late.back().to);  // the last first
      swapcontext(&mine.scheduler, &fiber.context);
      alive = true;
    }
    if (!alive) {
      warps[at] = warps.back();
      warps.pop_back();
    }
  }
  grid = nullptr;
  for (const Block& one : mine.block) {
    const u8* end = one.shared.data() + one.shared.size();
    if (std::any_of(end - GUARD, end, [](u8 byte) { return byte != POISON; })) {
      std::fprintf(stderr, "a block wrote past its %zu bytes of shared memory\n", shared);
      std::abort();
    }
  }
}
}  // namespace emulated

DEVICE u8* shared_memory() {
  return reinterpret_cast<u8*>((reinterpret_cast<u64>(emulated::block().shared.data()) + 15) / 16 *
                               16);
}
DEVICE u32 thread_index() { return emulated::grid->now->thread; }
DEVICE bool is_second_kernel() { return emulated::grid->now->block >= emulated::grid->first; }
DEVICE u32 block_index() {
  return emulated::grid->now->block - (is_second_kernel() ? emulated::grid->first : 0);
}
DEVICE u32 grid_size() {
  const u32 first = emulated::grid->first;
  return is_second_kernel() ? emulated::grid->blocks - first : first;
}
DEVICE void block_sync() { emulated::block_barrier(false); }
DEVICE bool block_any(bool flag) { return emulated::block_barrier(flag); }

DEVICE void wait_for_previous() {}
DEVICE void let_next_start() {}
DEVICE void fetch_line(const void*) {}

DEVICE u32 cluster_size() { return emulated::grid->cluster; }
DEVICE u32 cluster_rank() { return block_index() % cluster_size(); }
DEVICE emulated::Barrier& cluster_barrier() {
  return emulated::grid->clusters[block_index() / cluster_size()].barrier;
}
DEVICE void cluster_arrive() {
  emulated::land_all();
  emulated::Barrier& barrier = cluster_barrier();
  emulated::grid->now->cluster_target = barrier.generation + 1;
  if (++barrier.arrived == emulated::grid->threads * cluster_size()) {
    barrier.arrived = 0;
    barrier.generation++;
  }
}
DEVICE void cluster_wait() {
  while (cluster_barrier().generation < emulated::grid->now->cluster_target) emulated::yield();
}
template <typename T>
DEVICE T* peer(T* mine, u32 rank) {
  const u64 offset = reinterpret_cast<u8*>(mine) - shared_memory();
  emulated::Block& other =
      emulated::grid->block[block_index() / cluster_size() * cluster_size() + rank];
  const u64 base = (reinterpret_cast<u64>(other.shared.data()) + 15) / 16 * 16;
  return reinterpret_cast<T*>(base + offset);
}

DEVICE u32 __shfl_sync(u32, u32 value, u32 from) { return u32(emulated::meet(value)[from % 32]); }
DEVICE i32 __shfl_sync(u32, i32 value, u32 from) {
  return i32(emulated::meet(u32(value))[from % 32]);
}
DEVICE u32 __shfl_up_sync(u32, u32 value, u32 by) {
  const u64* all = emulated::meet(value);
  return emulated::lane() >= by ? u32(all[emulated::lane() - by]) : value;
}
DEVICE u32 __ballot_sync(u32, bool flag) {
  const u64* all = emulated::meet(flag);
  u32 bits = 0;
  for (u32 i = 0; i < 32; i++) bits |= u32(all[i]) << i;
  return bits;
}
DEVICE bool __all_sync(u32, bool flag) { return __ballot_sync(ALL_LANES, flag) == ALL_LANES; }
DEVICE bool __any_sync(u32, bool flag) { return __ballot_sync(ALL_LANES, flag) != 0; }
DEVICE u32 __reduce_add_sync(u32, u32 value) {
  const u64* all = emulated::meet(value);
  u32 sum = 0;
  for (u32 i = 0; i < 32; i++) sum += u32(all[i]);
  return sum;
}
DEVICE u32 __reduce_min_sync(u32, u32 value) {
  const u64* all = emulated::meet(value);
  return u32(*std::min_element(all, all + 32));
}
DEVICE u32 __reduce_max_sync(u32, u32 value) {
  const u64* all = emulated::meet(value);
  return u32(*std::max_element(all, all + 32));
}
DEVICE float __fdividef(float a, float b) { return a / b; }
DEVICE u32 __popc(u32 bits) { return __builtin_popcount(bits); }
DEVICE u32 __ffs(u32 bits) { return __builtin_ffs(bits); }
DEVICE u32 __clz(u32 bits) { return bits == 0 ? 32 : __builtin_clz(bits); }

template <typename T, typename V>
DEVICE T atomicAdd(T* to, V value) {
  emulated::maybe_yield();
  emulated::land_own(to);
  const T old = *to;
  *to = old + T(value);
  return old;
}
template <typename T>
DEVICE T atomicMax(T* to, T value) {
  emulated::maybe_yield();
  emulated::land_own(to);
  const T old = *to;
  *to = std::max(old, value);
  return old;
}
DEVICE u32 atomicOr(u32* to, u32 value) {
  emulated::maybe_yield();
  const u32 old = *to;
  *to = old | value;
  return old;
}
DEVICE i32 atomicCAS(i32* to, i32 expected, i32 value) {
  emulated::maybe_yield();
  emulated::land_own(to);
  const i32 old = *to;
  if (old == expected) *to = value;
  return old;
}

DEVICE i32 load_shared_value(const i32* from) {
  emulated::yield();  // it may be waited on
  emulated::land_own(from);
  return *from;
}
DEVICE void store_shared_value(i32* to, i32 value) { emulated::do_late({to, value, false}); }
DEVICE void raise_shared_value(i32* to, i32 value) { emulated::do_late({to, value, true}); }
DEVICE u32 load_from_block(const u32* from) {
  emulated::yield();  // waited on
  return *from;
}
DEVICE void store_to_block(u32* to, u32 value) {
  emulated::land_all();
  *to = value;
  emulated::maybe_yield();
}
DEVICE void warp_sync() {
  emulated::land_all();
  emulated::meet(0);
}
DEVICE void pause() { emulated::yield(); }
DEVICE u64 nanoseconds() { return emulated::grid->ticks += emulated::grid->tick; }
DEVICE Words load_words(const void* from) {
  if (reinterpret_cast<u64>(from) % 16 != 0) std::abort();  // as the hardware does
  Words words;
  std::memcpy(&words, from, 16);
  return words;
}
DEVICE void store_words(void* to, Words words) {
  if (reinterpret_cast<u64>(to) % 16 != 0) std::abort();
  std::memcpy(to, &words, 16);
}
DEVICE Words load_others_words(const void* from) { return load_words(from); }
DEVICE void device_fence() {
  emulated::land_all();
  emulated::maybe_yield();
}
DEVICE void copy_async(void* to_shared, const void* from) {
  store_words(to_shared, load_words(from));
}
DEVICE void copy_word_async(void* to_shared, const void* from) {
  std::memcpy(to_shared, from, 4);
}
DEVICE void async_wait() {}
DEVICE void store_whole(void* to, Words words) {
  store_words(to, words);
  emulated::maybe_yield();
}
DEVICE Words load_whole(const void* from) {
  emulated::yield();  // waited on
  return load_words(from);
}
DEVICE Words load_row_words(const void* from) { return load_words(from); }
DEVICE void store_row_words(void* to, Words words) { store_words(to, words); }
DEVICE u32 float_bits(float value) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
DEVICE float bits_float(u32 bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
DEVICE u32 grid_arrive(u32* counter, u32 block, u32 blocks) {
  emulated::land_all();
  return atomicAdd(counter, block == 0 ? 0x80000000u - (blocks - 1) : 1u);
}
DEVICE void grid_wait(u32* counter, u32 before) {
  while (((*counter ^ before) >> 31) == 0) emulated::yield();
}
