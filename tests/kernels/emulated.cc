// The kernels of kernels/cuda as a shared library for Python: same arguments, one CPU thread.
#include "topk.cu"
namespace recall {
#include "recall.cu"
}

extern "C" {
void run_topk(u32 blocks, u32 cluster, u32 shared, u32 seed, const TopkArguments* arguments) {
  emulated::launch(blocks, 1, TOPK_THREADS, cluster, shared, seed, [=] { topk(*arguments); });
}
void run_make_resident(u32 blocks, u32 shared, u32 seed,
                       const recall::ResidentArguments* arguments) {
  emulated::launch(blocks, 1, RECALL_THREADS, 1, shared, seed,
                   [=] { recall::make_resident(*arguments); });
}
void run_append_rows(u32 blocks, u32 shared, u32 seed, const recall::AppendArguments* arguments) {
  emulated::launch(blocks, 1, RECALL_THREADS, 1, shared, seed,
                   [=] { recall::append_rows(*arguments); });
}
void run_gather_rows(u32 blocks, u32 seed, const recall::GatherArguments* arguments) {
  emulated::launch(blocks, 1, RECALL_THREADS, 1, 16, seed,
                   [=] { recall::gather_rows(*arguments); });
}
void run_choose_victims(u32 blocks, u32 cluster, u32 shared, u32 seed,
                        const recall::VictimArguments* a) {
  emulated::launch(blocks, 1, RECALL_THREADS, cluster, shared, seed,
                   [=] { recall::choose_victims(*a); });
}
}
