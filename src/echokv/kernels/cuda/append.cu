// New rows in a launch of their own; contract in append.py.
#include "append.cuh"

struct AppendArguments {
  Layer layer;
  NewRows rows;
};

KERNEL(RECALL_THREADS, 2) void append_rows(ARGUMENTS AppendArguments a) {
  wait_for_previous();
  append_block<RECALL_THREADS>(a.layer, a.rows, block_index() * a.rows.each, grid_size() == 1);
}
