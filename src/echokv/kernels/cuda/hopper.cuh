// Hopper's asynchronous instructions: wgmma, and launches that overlap.
#pragma once
#include "bulk.cuh"

// Programmatic dependent launch: the next kernel may start; wait for the one before to be over.
// Neither does anything in a kernel launched without it.
DEVICE void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
DEVICE void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// A matrix operand in shared memory made of blocks of 8 rows x 16 bytes, 128 contiguous bytes each:
// neighbours along the rows' bytes are `along` bytes apart, neighbours across rows `across`.
DEVICE u64 matrix_descriptor(const void* at, u32 along, u32 across) {
  return u64((shared_address(at) & 0x3ffffu) >> 4) | u64(along >> 4) << 16 |
         u64(across >> 4) << 32;
}

#define ACCUMULATORS_16(d)                                                                       \
  "=&f"((d)[0]), "=&f"((d)[1]), "=&f"((d)[2]), "=&f"((d)[3]), "=&f"((d)[4]), "=&f"((d)[5]),      \
      "=&f"((d)[6]), "=&f"((d)[7]), "=&f"((d)[8]), "=&f"((d)[9]), "=&f"((d)[10]), "=&f"((d)[11]), \
      "=&f"((d)[12]), "=&f"((d)[13]), "=&f"((d)[14]), "=&f"((d)[15])
#define KEYS_16(a)                                                                              \
  "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3]), "r"((a)[4]), "r"((a)[5]), "r"((a)[6]),    \
      "r"((a)[7]), "r"((a)[8]), "r"((a)[9]), "r"((a)[10]), "r"((a)[11]), "r"((a)[12]),          \
      "r"((a)[13]), "r"((a)[14]), "r"((a)[15])

// The product of 64 keys and a query's heads, begun: four steps of 32 bytes of each key. Operands are
// the accumulators, 16 registers of keys, four descriptors of the query.
#define STEP_64(a0, a1, a2, a3, b, more)                                                        \
  "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "                                       \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                               \
  "{" a0 ", " a1 ", " a2 ", " a3 "}, " b ", " more ", 1, 1;\n"
#define BEGIN_PRODUCT_64                              \
  "{\n"                                               \
  ".reg .pred first, more;\n"                         \
  "setp.ne.b32 first, 0, 0;\n"                        \
  "setp.eq.b32 more, 0, 0;\n"                         \
  "wgmma.fence.sync.aligned;\n"                       \
  STEP_64("%32", "%33", "%34", "%35", "%48", "first") \
  STEP_64("%36", "%37", "%38", "%39", "%49", "more")  \
  STEP_64("%40", "%41", "%42", "%43", "%50", "more")  \
  STEP_64("%44", "%45", "%46", "%47", "%51", "more")  \
  "wgmma.commit_group.sync.aligned;\n"
#define STEP_32(a0, a1, a2, a3, b, more)                                     \
  "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
  "{" a0 ", " a1 ", " a2 ", " a3 "}, " b ", " more ", 1, 1;\n"
#define BEGIN_PRODUCT_32                              \
  "{\n"                                               \
  ".reg .pred first, more;\n"                         \
  "setp.ne.b32 first, 0, 0;\n"                        \
  "setp.eq.b32 more, 0, 0;\n"                         \
  "wgmma.fence.sync.aligned;\n"                       \
  STEP_32("%16", "%17", "%18", "%19", "%32", "first") \
  STEP_32("%20", "%21", "%22", "%23", "%33", "more")  \
  STEP_32("%24", "%25", "%26", "%27", "%34", "more")  \
  STEP_32("%28", "%29", "%30", "%31", "%35", "more")  \
  "wgmma.commit_group.sync.aligned;\n"
#define END_PRODUCT "}\n"
#define AWAIT_PRODUCTS "wgmma.wait_group.sync.aligned 0;\n"

// dots[64 keys, heads] = keys [64, 128] . query [heads, 128], e4m3, by one warpgroup: the keys in
// registers, the query in shared memory as four descriptors of 32 bytes each. Done on return.
DEVICE void multiply_64(float (&dots)[32], const u32 (&keys)[16], const u64 (&query)[4]) {
  asm volatile(BEGIN_PRODUCT_64 AWAIT_PRODUCTS END_PRODUCT
               : ACCUMULATORS_16(dots), ACCUMULATORS_16(dots + 16)
               : KEYS_16(keys), "l"(query[0]), "l"(query[1]), "l"(query[2]), "l"(query[3])
               : "memory");
}

DEVICE void multiply_32(float (&dots)[16], const u32 (&keys)[16], const u64 (&query)[4]) {
  asm volatile(BEGIN_PRODUCT_32 AWAIT_PRODUCTS END_PRODUCT
               : ACCUMULATORS_16(dots)
               : KEYS_16(keys), "l"(query[0]), "l"(query[1]), "l"(query[2]), "l"(query[3])
               : "memory");
}

#define KEYS_IN_OUT_16(a)                                                                      \
  "+r"((a)[0]), "+r"((a)[1]), "+r"((a)[2]), "+r"((a)[3]), "+r"((a)[4]), "+r"((a)[5]),          \
      "+r"((a)[6]), "+r"((a)[7]), "+r"((a)[8]), "+r"((a)[9]), "+r"((a)[10]), "+r"((a)[11]),    \
      "+r"((a)[12]), "+r"((a)[13]), "+r"((a)[14]), "+r"((a)[15])
#define IN_OUT_16(d)                                                                           \
  "+f"((d)[0]), "+f"((d)[1]), "+f"((d)[2]), "+f"((d)[3]), "+f"((d)[4]), "+f"((d)[5]),          \
      "+f"((d)[6]), "+f"((d)[7]), "+f"((d)[8]), "+f"((d)[9]), "+f"((d)[10]), "+f"((d)[11]),    \
      "+f"((d)[12]), "+f"((d)[13]), "+f"((d)[14]), "+f"((d)[15])

// The same, only begun: what `wait_for_products` gives, the keys and the query left alone until then.
// `query` describes the first 32 bytes; the others follow 256 bytes apart.
DEVICE void begin_64(float (&dots)[32], const u32 (&keys)[16], u64 query) {
  asm volatile(BEGIN_PRODUCT_64 END_PRODUCT
               : IN_OUT_16(dots), IN_OUT_16(dots + 16)
               : KEYS_16(keys), "l"(query), "l"(query + 16), "l"(query + 32), "l"(query + 48)
               : "memory");
}

DEVICE void begin_32(float (&dots)[16], const u32 (&keys)[16], u64 query) {
  asm volatile(BEGIN_PRODUCT_32 END_PRODUCT
               : IN_OUT_16(dots)
               : KEYS_16(keys), "l"(query), "l"(query + 16), "l"(query + 32), "l"(query + 48)
               : "memory");
}

// Wait until no more than so many of the products begun last are under way. Naming the registers
// keeps the compiler from using them before.
template <u32 UNDER_WAY>
DEVICE void wait_for_products(float (&dots)[32], u32 (&keys)[16]) {
  asm volatile("wgmma.wait_group.sync.aligned %48;"
               : IN_OUT_16(dots), IN_OUT_16(dots + 16), KEYS_IN_OUT_16(keys)
               : "n"(UNDER_WAY)
               : "memory");
}
template <u32 UNDER_WAY>
DEVICE void wait_for_products(float (&dots)[16], u32 (&keys)[16]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;"
               : IN_OUT_16(dots), KEYS_IN_OUT_16(keys)
               : "n"(UNDER_WAY)
               : "memory");
}

// Registers from one warpgroup of a block to others. All threads of a warpgroup.
template <u32 COUNT>
DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <u32 COUNT>
DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
