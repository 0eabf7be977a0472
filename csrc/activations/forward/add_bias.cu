#include "activations/forward/bias_rows.h"
#include "activations/policy.h"
#include "primitives/wave_rows.h"

namespace moe_fp8 {
namespace {

template <class Access>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, kActivateBlocks) add_bias_kernel(MOE_GRID_CONSTANT const AddBiasParams p) {
  constexpr int n = Access::kElements;
  const Access access(p.in);
  const int lane = threadIdx.x % kWarpSize, vecs = int(p.N / n);
  wait_for_previous_kernel();
  for (int64_t r = first_row(); r < p.rows; r += rows_per_grid()) {
    const int e = group_of_row(p.bias, int(r));
    const void* const x = access.address(p.x, r * p.x_stride);
    const void* const bias = access.address(p.bias.values, e * p.N);
    void* const out = access.address(p.out, r * p.N);
    for (int first = lane; first < vecs; first += kActivateVecs * kWarpSize) {
      typename Access::Raw x_vecs[kActivateVecs], bias_vecs[kActivateVecs] = {};
#pragma unroll
      for (int i = 0; i < kActivateVecs; ++i) {
        const int v = first + i * kWarpSize;
        if (v >= vecs) break;
        x_vecs[i] = access.load_once(x, int64_t(v) * n);
        if (e < p.bias.E) bias_vecs[i] = access.load(bias, int64_t(v) * n);
      }
#pragma unroll
      for (int i = 0; i < kActivateVecs; ++i) {
        const int v = first + i * kWarpSize;
        if (v >= vecs) break;
        float sums[n];
#pragma unroll
        for (int j = 0; j < n; ++j) sums[j] = access.element(x_vecs[i], j) + access.element(bias_vecs[i], j);
        access.store(out, int64_t(v) * n, sums);
      }
    }
  }
}

}  // namespace

int add_bias(const AddBiasParams& p, void* stream) {
  if (p.N == 0) return 0;
  const bool vectorized = p.in == InType::kBF16 && rows_are_vectorizable(p.x, p.x_stride, p.N, p.rows, 2) &&
                          rows_are_vectorizable(p.bias.values, p.N, p.N, p.bias.E, 2);
  if (!vectorized) return launch_on_rows(add_bias_kernel<ElementAccess>, p, p.rows, stream);
  return launch_on_rows(add_bias_kernel<VectorAccess<BF16>>, p, p.rows, stream);
}

}  // namespace moe_fp8
