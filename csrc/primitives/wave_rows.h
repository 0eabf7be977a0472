// Distributes rows over waves. A wave takes one row, or a few short ones, at a time, so sums along a row need no shared
// memory.
#pragma once
#include "numerics/groups.h"
#include "platform/launch.h"
#include "platform/waves.h"

namespace moe_fp8 {

constexpr int kThreads = 256;

MOE_DEVICE int64_t first_row() {
  return int64_t(blockIdx.x) * (kThreads / kWarpSize) + threadIdx.x / kWarpSize;
}
MOE_DEVICE int64_t rows_per_grid() { return int64_t(gridDim.x) * (kThreads / kWarpSize); }

// Launches a wave per row, up to the limit of a grid; the waves loop over further rows. shared: bytes per block.
// Returns 0 or the runtime's error code.
template <class Params>
int launch_on_rows(void (*kernel)(Params), const Params& p, int64_t rows, void* stream, size_t shared = 0) {
  const int64_t blocks = ceil_div<int64_t>(rows, kThreads / kMaxWarpSize);
  if (blocks == 0) return 0;
  return launch(kernel, {dim3(grid_blocks(blocks, kThreads)), dim3(kThreads), stream, shared}, p);
}

}  // namespace moe_fp8
