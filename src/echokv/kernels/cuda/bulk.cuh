// Bulk copies into shared memory, and barriers there that count what they bring.
#pragma once
#include "device.cuh"

#ifndef ECHOKV_EMULATE

DEVICE u32 shared_address(const void* at) {
  return u32(__cvta_generic_to_shared(const_cast<void*>(at)));
}

// A barrier in shared memory that counts arrivals and, where told to, bytes that copies bring.
typedef u64 Barrier;

DEVICE void barrier_init(Barrier* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
// Before the first use by copies, once the block's barriers are made.
DEVICE void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
DEVICE void barrier_arrive_expecting(Barrier* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
DEVICE void barrier_expect(Barrier* barrier, u32 bytes) {  // before this phase's last arrival
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
// Wait until the phase of this parity is over; that of parity 1 is over at first.
DEVICE void barrier_wait(Barrier* barrier, u32 parity) {
  const u32 address = shared_address(barrier);
  u32 done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred over;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
        "selp.u32 %0, 1, 0, over;\n"
        "}\n"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
  } while (done == 0);
}

// Contiguous bytes, a multiple of sixteen, from global to shared memory.
DEVICE void copy_to_shared(void* to, const void* from, u32 bytes, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// The same for what nobody reads again soon: it is the first to leave the L2 cache.
DEVICE void copy_to_shared_once(void* to, const void* from, u32 bytes, Barrier* barrier) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], "
      "%2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

#endif
