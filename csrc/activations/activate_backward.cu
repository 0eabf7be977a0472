#include "activations/gates.h"
#include "activations/launch.h"

namespace moe_fp8 {
namespace {

// Vectors that a lane has under way: of a row, or of two rows where a wave has lanes enough for one.
constexpr int kHeld = 2;

template <int kRows, class Source, class Part, class Activated>
MOE_DEVICE void backward_of_rows(const ActivateBackwardParams& p, const Source& source, int64_t row0) {
  constexpr int n = Part::kElements, kParts = Source::Columns::kParts, kVecs = kHeld / kRows;
  constexpr bool kSumEach = kRows == 1 && n > 1;  // vector of the wave, in the order of gradient_rows.cu: the same bits
  const Part part(p.in);
  const Activated activated(p.activation);
  const int lane = threadIdx.x % kWarpSize, vecs = int(p.h.F / n);
  const int live = p.P - row0 < kRows ? 1 : kRows;
  typename Source::Row h[kRows];
  const void* da[kRows];
  float score[kRows], dot[kRows] = {}, sum = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {  // one that there is not has its neighbour's place
    h[r] = r == 0 ? source.row(row0) : r < live ? source.next(h[r - 1]) : h[r - 1];
    da[r] = r == 0 ? part.advanced(p.da, row0 * p.da_stride) : part.advanced(da[r - 1], r < live ? p.da_stride : 0);
    score[r] = p.scores ? p.scores[r < live ? row0 + r : row0] : 1.f;
  }
  const int64_t out = row0 * p.h.F;
  const int end = kSumEach ? vecs + lane : vecs;  // whole waves sum
  for (int first = lane; first < end; first += kVecs * kWarpSize) {
    typename Source::Held held[kRows][kVecs];
    typename Part::Held grads[kRows][kVecs];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        const int v = first + i * kWarpSize;
        if (v >= vecs) break;
        held[r][i] = source.load(h[r], v);
        grads[r][i] = part.load_once(da[r], int64_t(v) * n);
      }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        const int v = first + i * kWarpSize;
        if constexpr (kSumEach) {
          if (v - lane >= vecs) break;
          if (v > lane) sum += wave_sum(dot[0]);
          dot[0] = 0;
        }
        if (v >= vecs || r >= live) break;
        const Gates<n> of_h = source.values(h[r], held[r][i]);
        Gates<n> of_dh;
        float of_a[n];
#pragma unroll
        for (int j = 0; j < n; ++j) {
          const float grad = part.element(grads[r][i], j);
          const ActivationGradient g = activated.gradient(of_h.gate[j], of_h.up[j], score[r] * grad);
          dot[r] = fmaf(grad, g.a, dot[r]);
          of_a[j] = score[r] * g.a;
          of_dh.gate[j] = g.gate;
          of_dh.up[j] = g.up;
        }
        source.columns.store(part, part.advanced(p.dh, (out + r * p.h.F) * kParts), v, of_dh);
        part.store(p.a, out + r * p.h.F + int64_t(v) * n, of_a);
      }
  }
  constexpr int kLanes = kWarpSize / kRows;
  const int of_row = lane / kLanes;
  const float last = wave_sums(dot);
  if (lane % kLanes == 0 && of_row < live)
    store_element(p.dscores, InType::kF32, row0 + of_row, kSumEach ? sum + last : 0.f + last);
}

template <int kRows, class Source, class Part, class Activated>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 3)
    activate_backward_kernel(MOE_GRID_CONSTANT const ActivateBackwardParams p) {
  wait_for_previous_kernel();
  const Source source(p.h);
  for (int64_t row = first_row() * kRows; row < p.P; row += rows_at_once() * kRows) {
    auto run = [&](const Source& source) { backward_of_rows<kRows, Source, Part, Activated>(p, source, row); };
    if constexpr (kRows == 1) run(source);  // its loop twice would not fit into the registers
    else source.known(run);
  }
}

template <int kRows, class Source, class Part, class Activated>
int launch_rows(const ActivateBackwardParams& p, void* stream) {
  return launch_on_rows(activate_backward_kernel<kRows, Source, Part, Activated>, p, ceil_div<int64_t>(p.P, kRows),
                        stream);
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
    using Part = Vectors<BF16>;
    if (p.h.F <= Part::kElements * kSmallestWarp)
      return launch_rows<kHeld, Gates, Part, FixedActivation<kActivation>>(p, stream);
    return launch_rows<1, Gates, Part, FixedActivation<kActivation>>(p, stream);
  });
}
template <template <bool> class Source>
int launch_any(const ActivateBackwardParams& p, void* stream) {
  return is_gated(p.activation) ? launch_rows<1, Source<true>, Elements, AnyActivation>(p, stream)
                                : launch_rows<1, Source<false>, Elements, AnyActivation>(p, stream);
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
