#include "activations/gates.h"
#include "activations/launch.h"

namespace moe_fp8 {
namespace {

template <class Source, class Part, class Activated>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 3)
    activate_backward_kernel(MOE_GRID_CONSTANT const ActivateBackwardParams p) {
  constexpr int n = Part::kElements, kHeld = 2;
  const Source source(p.h);
  const Part part(p.in);
  const Activated activated(p.activation);
  const int lane = threadIdx.x % kWarpSize, vecs = int(p.h.F / n);
  wait_for_previous_kernel();
  for (int64_t r = first_row(); r < p.P; r += rows_at_once()) {
    const auto h = source.row(r);
    const void* const da = part.advanced(p.da, r * p.da_stride);
    void* const a = part.advanced(p.a, r * p.h.F);
    void* const dh = part.advanced(p.dh, r * p.h.F * Source::Columns::kParts);
    const float score = p.scores ? p.scores[r] : 1.f;
    float dot = 0;
    for (int first = lane; first < vecs; first += kHeld * kWarpSize) {
      typename Source::Held held[kHeld];
      typename Part::Held grads[kHeld];
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int v = first + i * kWarpSize;
        if (v >= vecs) break;
        held[i] = source.load(h, v);
        grads[i] = part.load_once(da, int64_t(v) * n);
      }
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int v = first + i * kWarpSize;
        if (v >= vecs) break;
        const Gates<n> of_h = source.values(h, held[i]);
        Gates<n> of_dh;
        float of_a[n];
#pragma unroll
        for (int j = 0; j < n; ++j) {
          const float grad = part.element(grads[i], j);
          const ActivationGradient g = activated.gradient(of_h.gate[j], of_h.up[j], score * grad);
          dot = fmaf(grad, g.a, dot);
          of_a[j] = score * g.a;
          of_dh.gate[j] = g.gate;
          of_dh.up[j] = g.up;
        }
        part.store(a, int64_t(v) * n, of_a);
        source.columns.store(part, dh, v, of_dh);
      }
    }
    dot = wave_sum(dot);
    if (lane == 0) store_element(p.dscores, InType::kF32, r, dot);
  }
}

template <bool kGated> using PlainVectors = PlainGates<Vectors<BF16>, kGated>;
template <bool kGated> using Fp8Vectors = Fp8Gates<8, kGated>;
template <bool kGated> using PlainElements = PlainGates<Elements, kGated>;
template <bool kGated> using Fp8Elements = Fp8Gates<1, kGated>;

template <template <bool> class Source>
int launch_fast(const ActivateBackwardParams& p, void* stream) {
  return dispatch_activation(p.activation, [&](auto activation) {
    constexpr Activation kActivation = decltype(activation)::value;
    using Gates = Source<is_gated(kActivation)>;
    return launch_on_rows(activate_backward_kernel<Gates, Vectors<BF16>, FixedActivation<kActivation>>, p, p.P, stream);
  });
}
template <template <bool> class Source>
int launch_any(const ActivateBackwardParams& p, void* stream) {
  return is_gated(p.activation)
             ? launch_on_rows(activate_backward_kernel<Source<true>, Elements, AnyActivation>, p, p.P, stream)
             : launch_on_rows(activate_backward_kernel<Source<false>, Elements, AnyActivation>, p, p.P, stream);
}

}  // namespace

int activate_backward(const ActivateBackwardParams& p, void* stream) {
  const bool fp8 = p.h.scale.data != nullptr;
  const bool native = !fp8 || is_fnuz(p.h.fp8) == device().native_fnuz;
  if (native && p.in == InType::kBF16 && is_of_vectors(p.h.h, p.h.stride, p.h.F, p.P, fp8 ? 1 : 2) &&
      is_of_vectors(p.da, p.da_stride, p.h.F, p.P, 2))
    return fp8 ? launch_fast<Fp8Vectors>(p, stream) : launch_fast<PlainVectors>(p, stream);
  return fp8 ? launch_any<Fp8Elements>(p, stream) : launch_any<PlainElements>(p, stream);
}

}  // namespace moe_fp8
