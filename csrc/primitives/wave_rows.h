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
MOE_DEVICE int64_t rows_at_once() { return int64_t(gridDim.x) * (kThreads / kWarpSize); }

// Of one row, or of two: a sum over the wave of what lanes have of each, that of row lane * kRows / kWarpSize.
template <int kRows>
MOE_DEVICE float wave_sums(const float (&of)[kRows]) {
  static_assert(kRows == 1 || kRows == 2);
  if constexpr (kRows == 1) return wave_sum(of[0]);
  constexpr int kHalf = kWarpSize / 2;
  const bool upper = threadIdx.x % kWarpSize >= kHalf;
  float v = (upper ? of[kRows - 1] : of[0]) + as_float(shfl_xor(as_bits(upper ? of[0] : of[kRows - 1]), kHalf));
  for (int mask = kHalf / 2; mask > 0; mask >>= 1) v += as_float(shfl_xor(as_bits(v), mask));
  return v;
}

// shared: bytes a block.
template <class Params>
int launch_on_rows(void (*kernel)(Params), const Params& p, int64_t rows, void* stream, size_t shared = 0) {
  const int64_t blocks = ceil_div<int64_t>(rows, kThreads / kLargestWarp);
  if (blocks == 0) return 0;
  return launch(kernel, {dim3(unsigned(blocks < kMaxBlocks ? blocks : kMaxBlocks)), dim3(kThreads), stream, shared}, p);
}

}  // namespace moe_fp8
