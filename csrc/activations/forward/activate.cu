#include "activations/gates.h"
#include "activations/policy.h"
#include "primitives/wave_rows.h"

namespace moe_fp8 {
namespace {

template <class Access, class Activations>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, kActivateBlocks)
    activate_kernel(MOE_GRID_CONSTANT const ActivateParams p) {
  constexpr int n = Access::kElements;
  const Access access(p.h.in);
  const int lane = threadIdx.x % kWarpSize, vecs = int(p.h.F / n);
  wait_for_previous_kernel();
  Activations::dispatch(p.activation, [&](auto activation) {
    constexpr Activation kActivation = decltype(activation)::value;
    using Reader = PlainReader<Access, kIsGated<kActivation>>;
    const Reader reader(p.h);
    for (int64_t r = first_row(); r < p.P; r += rows_per_grid()) {
      const auto h = reader.row(r);
      void* const out = access.address(p.a, r * p.h.F);
      for (int first = lane; first < vecs; first += kActivateVecs * kWarpSize) {
        typename Reader::Raw raw[kActivateVecs];
#pragma unroll
        for (int i = 0; i < kActivateVecs; ++i)
          if (const int v = first + i * kWarpSize; v < vecs) raw[i] = reader.load(h, v);
#pragma unroll
        for (int i = 0; i < kActivateVecs; ++i) {
          const int v = first + i * kWarpSize;
          if (v >= vecs) break;
          const GateUp<n> g = reader.decode(h, raw[i]);
          float a[n];
#pragma unroll
          for (int j = 0; j < n; ++j) a[j] = activated<kActivation>(g.gate[j], g.up[j], p.h.clamp);
          access.store(out, int64_t(v) * n, a);
        }
      }
    }
  });
}

}  // namespace

int activate(const ActivateParams& p, void* stream) {
  if (p.h.F == 0) return 0;
  const bool vectorized = p.h.in == InType::kBF16 && rows_are_vectorizable(p.h.h, p.h.stride, p.h.F, p.P, 2);
  if (!vectorized) return launch_on_rows(activate_kernel<ElementAccess, AllActivations>, p, p.P, stream);
  const auto launch_set = [&](auto activations) {
    return launch_on_rows(activate_kernel<VectorAccess<BF16>, decltype(activations)>, p, p.P, stream);
  };
  // relu2 has a separate kernel, which takes fewer registers (docs/kernels/activations.md).
  if (p.activation == Activation::kRelu2) return launch_set(ActivationSet<Activation::kRelu2>{});
  return dispatch_activations(p.activation, launch_set);
}

}  // namespace moe_fp8
