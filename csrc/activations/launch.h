// How rows are shared out: a wave takes a row at a time, so that sums along it need no shared memory.
#pragma once
#include "activations/activations.h"
#include "platform/launch.h"
#include "platform/waves.h"

namespace moe_fp8 {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1 << 23;  // HIP has fewer than 2^32 threads a launch

MOE_DEVICE int64_t first_row() {
  return int64_t(blockIdx.x) * (kThreads / kWarpSize) + threadIdx.x / kWarpSize;
}
MOE_DEVICE int64_t rows_at_once() { return int64_t(gridDim.x) * (kThreads / kWarpSize); }

template <class Params>
int launch_on_rows(void (*kernel)(Params), const Params& p, int64_t rows, void* stream) {
  const int64_t blocks = ceil_div<int64_t>(rows, kThreads / kLargestWarp);
  if (blocks == 0) return 0;
  return launch(kernel, {dim3(unsigned(blocks < kMaxBlocks ? blocks : kMaxBlocks)), dim3(kThreads), stream}, p);
}

// Whether rows of F elements, `bytes` each, from p on are vectors of 8 elements that lie where such vectors may.
inline bool is_of_vectors(const void* p, int64_t stride, int64_t F, int64_t rows, int64_t bytes) {
  const uint64_t between = rows > 1 ? stride * bytes : 0;
  return F % 8 == 0 && (reinterpret_cast<uintptr_t>(p) | between) % (8 * bytes) == 0;
}

}  // namespace moe_fp8
