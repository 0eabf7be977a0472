// How rows are shared out: a wave takes a row, or a few short ones, at a time, so that sums along it need no shared
// memory.
#pragma once
#include "numerics/groups.h"
#include "platform/launch.h"
#include "platform/waves.h"

namespace moe_fp8 {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1 << 23;  // HIP has fewer than 2^32 threads a launch

MOE_DEVICE int64_t first_row() {
  return int64_t(blockIdx.x) * (kThreads / kWarpSize) + threadIdx.x / kWarpSize;
}
MOE_DEVICE int64_t rows_per_grid() { return int64_t(gridDim.x) * (kThreads / kWarpSize); }

// shared: bytes a block.
template <class Params>
int launch_on_rows(void (*kernel)(Params), const Params& p, int64_t rows, void* stream, size_t shared = 0) {
  const int64_t blocks = ceil_div<int64_t>(rows, kThreads / kMaxWarpSize);
  if (blocks == 0) return 0;
  return launch(kernel, {dim3(unsigned(blocks < kMaxBlocks ? blocks : kMaxBlocks)), dim3(kThreads), stream, shared}, p);
}

}  // namespace moe_fp8
