#include "activations/gates.h"
#include "activations/policy.h"
#include "primitives/wave_rows.h"

namespace moe_fp8 {
namespace {

// A wave computes kRows rows from row0 on. A lane has kActivateBackwardVecs vectors in flight: of one row, or one of
// each of two rows if a row has no more vectors than a wave has lanes.
template <int kRows, Activation kActivation, class Access, class Reader>
MOE_DEVICE void backward_of_rows(const ActivateBackwardParams& p, const Reader& reader, int64_t row0) {
  constexpr int n = Access::kElements, kVectors = Reader::Layout::kVectors, kVecs = kActivateBackwardVecs / kRows;
  // The dot product of each vector is summed over the wave, as gradient_rows.cu does: the same order, the same bits.
  constexpr bool kSumEach = kRows == 1 && n > 1;
  const Access access(p.in);
  const int lane = threadIdx.x % kWarpSize, vecs = int(p.h.F / n);
  const int valid_rows = p.P - row0 < kRows ? 1 : kRows;
  typename Reader::Row h[kRows];
  const void* da[kRows];
  float score[kRows], dot[kRows] = {}, sum = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {  // an out-of-range row repeats the addresses of its neighbour
    h[r] = r == 0 ? reader.row(row0) : r < valid_rows ? reader.next(h[r - 1]) : h[r - 1];
    da[r] = r == 0 ? access.address(p.da, row0 * p.da_stride)
                   : access.address(da[r - 1], r < valid_rows ? p.da_stride : 0);
    score[r] = p.score(r < valid_rows ? row0 + r : row0);
  }
  const int64_t out = row0 * p.h.F;
  const int end = kSumEach ? vecs + lane : vecs;  // with kSumEach all lanes stay in the loop, for its shuffles
  for (int first = lane; first < end; first += kVecs * kWarpSize) {
    typename Reader::Raw raw[kRows][kVecs];
    typename Access::Raw grads[kRows][kVecs];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        const int v = first + i * kWarpSize;
        if (v >= vecs) break;
        raw[r][i] = reader.load(h[r], v);
        grads[r][i] = access.load_once(da[r], int64_t(v) * n);
      }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        const int v = first + i * kWarpSize;
        if constexpr (kSumEach) {
          if (v - lane >= vecs) break;
          if (v > lane) sum += reduce_scatter_sum(dot);
          dot[0] = 0;
        }
        if (v >= vecs || r >= valid_rows) break;
        const GateUp<n> h_values = reader.decode(h[r], raw[r][i]);
        GateUp<n> dh;
        float a[n];
#pragma unroll
        for (int j = 0; j < n; ++j) {
          const float grad = access.element(grads[r][i], j);
          const ActivationGradient g =
              activation_gradient<kActivation>(h_values.gate[j], h_values.up[j], score[r] * grad, p.h.clamp);
          dot[r] = fmaf(grad, g.a, dot[r]);
          a[j] = score[r] * g.a;
          dh.gate[j] = g.gate;
          dh.up[j] = g.up;
        }
        reader.layout.store(access, access.address(p.dh, (out + r * p.h.F) * kVectors), v, dh);
        access.store(p.a, out + r * p.h.F + int64_t(v) * n, a);
      }
  }
  const float last = reduce_scatter_sum(dot);
  if (const int r = reduce_scatter_sum_index<kRows>(lane); lane < kRows && r < valid_rows)
    if (const int slot = p.slot(row0 + r); slot >= 0)
      store_element(p.dscores, InType::kF32, slot, kSumEach ? sum + last : 0.f + last);
}

// Rows that a wave takes at once: several if one row leaves lanes idle, even in the smallest wave of any chip.
template <class Access>
MOE_HD int rows_per_wave(const ActivateBackwardParams& p) {
  return Access::kElements > 1 && p.h.F <= Access::kElements * kMinWarpSize ? kActivateBackwardVecs : 1;
}

template <class Access, bool kFp8, bool kGated>
using ReaderOf = std::conditional_t<kFp8, Fp8Reader<Access::kElements, kGated>, PlainReader<Access, kGated>>;

enum class HType { kPlain, kFp8, kRuntime };  // kRuntime: the kernel asks whether h has scales
template <class Access, HType kHType, class Activations>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(
    kThreads, activate_backward_blocks(std::is_same_v<Activations, ActivationSet<Activation::kClampedSwiglu>>))
    activate_backward_kernel(MOE_GRID_CONSTANT const ActivateBackwardParams p) {
  wait_for_previous_kernel();
  const auto run = [&](auto fp8) {
    Activations::dispatch(p.activation, [&](auto activation) {
      constexpr Activation kActivation = decltype(activation)::value;
      using Reader = ReaderOf<Access, decltype(fp8)::value, kIsGated<kActivation>>;
      const Reader reader(p.h);
      if constexpr (Access::kElements > 1)
        if (rows_per_wave<Access>(p) == kActivateBackwardVecs) {
          for (int64_t row = first_row() * kActivateBackwardVecs; row < p.P;
               row += rows_per_grid() * kActivateBackwardVecs)
            backward_of_rows<kActivateBackwardVecs, kActivation, Access>(p, reader, row);
          return;
        }
      for (int64_t row = first_row(); row < p.P; row += rows_per_grid())
        backward_of_rows<1, kActivation, Access>(p, reader, row);
    });
  };
  if constexpr (kHType == HType::kRuntime) {
    if (p.h.scale.data) run(std::true_type{});
    else run(std::false_type{});
  } else {
    run(std::bool_constant<kHType == HType::kFp8>{});
  }
}

template <HType kHType, class Access, class Activations>
int launch_with(const ActivateBackwardParams& p, void* stream) {
  constexpr auto kKernel = activate_backward_kernel<Access, kHType, Activations>;
  return launch_on_rows(kKernel, p, ceil_div<int64_t>(p.P, rows_per_wave<Access>(p)), stream);
}

}  // namespace

int activate_backward(const ActivateBackwardParams& p, void* stream) {
  if (p.slots.at)
    if (const int e = fill_bytes(p.dscores, 0, p.num_slots() * sizeof(float), stream)) return e;
  const bool fp8 = p.h.scale.data != nullptr;
  const bool native = !fp8 || is_fnuz(p.h.fp8) == device().native_fnuz;
  const bool vectorized = native && p.in == InType::kBF16 &&
                          rows_are_vectorizable(p.h.h, p.h.stride, p.h.F, p.P, fp8 ? 1 : 2) &&
                          rows_are_vectorizable(p.da, p.da_stride, p.h.F, p.P, 2);
  if (!vectorized) return launch_with<HType::kRuntime, ElementAccess, AllActivations>(p, stream);
  return dispatch_activations(p.activation, [&](auto activations) {
    using Activations = decltype(activations);
    return fp8 ? launch_with<HType::kFp8, VectorAccess<BF16>, Activations>(p, stream)
               : launch_with<HType::kPlain, VectorAccess<BF16>, Activations>(p, stream);
  });
}

}  // namespace moe_fp8
