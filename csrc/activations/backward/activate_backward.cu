#include "activations/gates.h"
#include "activations/launch.h"

namespace moe_fp8 {
namespace {

// Vectors that a lane has under way: of a row, or of two rows where a wave has lanes enough for one.
constexpr int kHeld = 2;

template <int kRows, Activation kActivation, class Access, class Source>
MOE_DEVICE void backward_of_rows(const ActivateBackwardParams& p, const Source& source, int64_t row0) {
  constexpr int n = Access::kElements, kParts = Source::Columns::kParts, kVecs = kHeld / kRows;
  constexpr bool kSumEach = kRows == 1 && n > 1;  // vector of the wave, in the order of gradient_rows.cu: the same bits
  const Access part(p.in);
  const int lane = threadIdx.x % kWarpSize, vecs = int(p.h.F / n);
  const int live = p.P - row0 < kRows ? 1 : kRows;
  typename Source::Row h[kRows];
  const void* da[kRows];
  float score[kRows], dot[kRows] = {}, sum = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {  // one that there is not has its neighbour's place
    h[r] = r == 0 ? source.row(row0) : r < live ? source.next(h[r - 1]) : h[r - 1];
    da[r] = r == 0 ? part.advanced(p.da, row0 * p.da_stride) : part.advanced(da[r - 1], r < live ? p.da_stride : 0);
    score[r] = p.score(r < live ? row0 + r : row0);
  }
  const int64_t out = row0 * p.h.F;
  const int end = kSumEach ? vecs + lane : vecs;  // whole waves sum
  for (int first = lane; first < end; first += kVecs * kWarpSize) {
    typename Source::Held held[kRows][kVecs];
    typename Access::Held grads[kRows][kVecs];
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
          if (v > lane) sum += neighbour_sums(dot);
          dot[0] = 0;
        }
        if (v >= vecs || r >= live) break;
        const Gates<n> of_h = source.values(h[r], held[r][i]);
        Gates<n> of_dh;
        float of_a[n];
#pragma unroll
        for (int j = 0; j < n; ++j) {
          const float grad = part.element(grads[r][i], j);
          const ActivationGradient g = activation_gradient<kActivation>(of_h.gate[j], of_h.up[j], score[r] * grad);
          dot[r] = fmaf(grad, g.a, dot[r]);
          of_a[j] = score[r] * g.a;
          of_dh.gate[j] = g.gate;
          of_dh.up[j] = g.up;
        }
        source.columns.store(part, part.advanced(p.dh, (out + r * p.h.F) * kParts), v, of_dh);
        part.store(p.a, out + r * p.h.F + int64_t(v) * n, of_a);
      }
  }
  const float last = neighbour_sums(dot);
  if (const int r = number_of_lane<kRows>(lane); lane < kRows && r < live)
    if (const int slot = p.slot(row0 + r); slot >= 0)
      store_element(p.dscores, InType::kF32, slot, kSumEach ? sum + last : 0.f + last);
}

// Of a wave at once: two where a row has no vector for some of the lanes that any chip's wave has.
template <class Access>
MOE_HD int rows_of_wave(const ActivateBackwardParams& p) {
  return Access::kElements > 1 && p.h.F <= Access::kElements * kSmallestWarp ? kHeld : 1;
}

template <class Access, bool kFp8, bool kGated>
using GatesOf = std::conditional_t<kFp8, Fp8Gates<Access::kElements, kGated>, PlainGates<Access, kGated>>;

// kAny: decided while it runs.
enum class OfH { kPlain, kFp8, kAny };
template <class Access, OfH kOfH, class Activations>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 3)
    activate_backward_kernel(MOE_GRID_CONSTANT const ActivateBackwardParams p) {
  wait_for_previous_kernel();
  const auto walk = [&](auto fp8) {
    Activations::with(p.activation, [&](auto activation) {
      constexpr Activation kActivation = decltype(activation)::value;
      using Source = GatesOf<Access, decltype(fp8)::value, kIsGated<kActivation>>;
      const Source source(p.h);
      if constexpr (Access::kElements > 1)
        if (rows_of_wave<Access>(p) == kHeld) {
          for (int64_t row = first_row() * kHeld; row < p.P; row += rows_at_once() * kHeld)
            backward_of_rows<kHeld, kActivation, Access>(p, source, row);
          return;
        }
      for (int64_t row = first_row(); row < p.P; row += rows_at_once())
        backward_of_rows<1, kActivation, Access>(p, source, row);
    });
  };
  if constexpr (kOfH == OfH::kAny) {
    if (p.h.scale.data) walk(std::true_type{});
    else walk(std::false_type{});
  } else {
    walk(std::bool_constant<kOfH == OfH::kFp8>{});
  }
}

template <OfH kOfH, class Access, class Activations>
int launch_with(const ActivateBackwardParams& p, void* stream) {
  constexpr auto kKernel = activate_backward_kernel<Access, kOfH, Activations>;
  return launch_on_rows(kKernel, p, ceil_div<int64_t>(p.P, rows_of_wave<Access>(p)), stream);
}

}  // namespace

int activate_backward(const ActivateBackwardParams& p, void* stream) {
  if (p.slots.at)
    if (const int e = fill_bytes(p.dscores, 0, p.num_slots() * sizeof(float), stream)) return e;
  const bool fp8 = p.h.scale.data != nullptr;
  const bool native = !fp8 || is_fnuz(p.h.fp8) == device().native_fnuz;
  const bool fast = native && p.in == InType::kBF16 &&
                    is_of_vectors(p.h.h, p.h.stride, p.h.F, p.P, fp8 ? 1 : 2) &&
                    is_of_vectors(p.da, p.da_stride, p.h.F, p.P, 2);
  if (!fast) return launch_with<OfH::kAny, ElementAccess, All>(p, stream);
  return dispatch_activations(p.activation, [&](auto activations) {
    using Activations = decltype(activations);
    return fp8 ? launch_with<OfH::kFp8, VectorAccess<BF16>, Activations>(p, stream)
               : launch_with<OfH::kPlain, VectorAccess<BF16>, Activations>(p, stream);
  });
}

}  // namespace moe_fp8
