#include "tokens/invert.h"

#include "numerics/groups.h"
#include "platform/launch.h"
#include "tokens/policy.h"

namespace moe_fp8 {
namespace {

struct InvertIndicesParams {
  const int* indices;
  int* inverse;
  int64_t count, size;
};

// The maximum is the same in whatever order the threads run.
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kInvertThreads, 1)
    invert_indices_kernel(MOE_GRID_CONSTANT const InvertIndicesParams p) {
  wait_for_previous_kernel();
  const int64_t threads = int64_t(gridDim.x) * kInvertThreads;
  for (int64_t i = int64_t(blockIdx.x) * kInvertThreads + threadIdx.x; i < p.count; i += threads) {
    const int index = p.indices[i];
    if (index >= 0 && index < p.size) atomicMax(p.inverse + index, int(i));
  }
}

}  // namespace

int invert_indices(const int* indices, int64_t count, int* inverse, int64_t size, void* stream) {
  if (const int e = fill_bytes(inverse, 0xff, size_t(size) * sizeof(int), stream)) return e;
  if (count == 0 || size == 0) return 0;
  const dim3 grid(grid_blocks(ceil_div<int64_t>(count, kInvertThreads), kInvertThreads));
  const Launch l = {grid, dim3(kInvertThreads), stream};
  return launch(invert_indices_kernel, l, InvertIndicesParams{indices, inverse, count, size});
}

}  // namespace moe_fp8
