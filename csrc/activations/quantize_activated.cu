#include "activations/quantize_activated.h"

#include "activations/gates.h"
#include "activations/launch.h"
#include "quantize/row.h"

namespace moe_fp8 {
namespace {

using Types = Fast<BF16, Kind::kEither>;  // of a and of the h that is kept
using Part = Vectors<BF16>;
template <Activation kActivation>
using GatesOf = PlainGates<Part, is_gated(kActivation)>;
using One = PlainGates<Part, false>::Held;  // vector, of a
constexpr int n = Part::kElements;

template <Activation kActivation>
MOE_DEVICE One activated_vec(const GatesOf<kActivation>& source, const void* row,
                             const typename GatesOf<kActivation>::Held& h) {
  const Gates<n> gates = source.values(row, h);
  float a[n];
#pragma unroll
  for (int j = 0; j < n; ++j) a[j] = activated<kActivation>(gates.gate[j], gates.up[j]);
  return {{Part::rounded(a)}};
}

// ---- a scale a row: a team of threads holds it in registers, two rows for its scale and that of a -------------------

constexpr int kVecs = 2, kMostThreads = 512, kUsualThreads = 256;
constexpr int64_t kMostFeatures = int64_t(kMostThreads) * kVecs * n;

// at(v, part): where among the row's vectors one lies.
template <class T, class Held, class At>
MOE_DEVICE void quantize_whole(const QuantizeParams& p, const RowTeam& team, int64_t row, int vecs,
                               const Held (&held)[kVecs], At at) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i)
    for (const Vec16& vec : held[i].part) amax = max_vec<BF16>(amax, vec);
  const auto s = T::template scale_of<ScaleF32>(p, team.max(amax_bits<BF16>(amax)));
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int v = i * team.count + team.rank;
    if (v >= vecs) break;
    int part = 0;
    for (const Vec16& vec : held[i].part)
      store_cast<T>(p, p.q + row * p.K, at(v, part++), vec, s.multiplier);
  }
  if (vecs > 0 && team.rank == 0) static_cast<float*>(p.scale)[row] = s.dequant();
}

template <class T, Activation kActivation>
MOE_DEVICE void quantize_activated_rows(const QuantizeActivatedParams& p, const RowTeam& of_h, const RowTeam& of_a) {
  const GatesOf<kActivation> source(p.h);
  for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < p.P; first += int64_t(gridDim.x) * blockDim.y) {
    const int64_t row = first + threadIdx.y;
    const int vecs = row < p.P ? int(p.h.F / n) : 0;
    const void* const from = source.row(row);
    typename GatesOf<kActivation>::Held h[kVecs] = {};
    One a[kVecs];
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      if (const int v = i * of_h.count + of_h.rank; v < vecs) h[i] = source.load(from, v);
    auto at_h = [&](int v, int part) { return int(source.columns.at(v, part) / n); };
    if (p.of_h.rows > 0) quantize_whole<T>(p.of_h, of_h, row, vecs, h, at_h);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) a[i] = activated_vec<kActivation>(source, from, h[i]);
    quantize_whole<T>(p.of_a, of_a, row, vecs, a, [](int v, int) { return v; });
  }
}

template <class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kMostThreads, 2)
    quantize_activated_rows_kernel(MOE_GRID_CONSTANT const QuantizeActivatedParams p) {
  __shared__ uint32_t of_wave[2][kMostThreads / 32];
  const int rank = int(threadIdx.x), count = int(blockDim.x), wave = int(threadIdx.y) * count / kWarpSize;
  wait_for_previous_kernel();
  dispatch_activation(p.activation, [&](auto activation) {
    constexpr Activation kActivation = decltype(activation)::value;
    quantize_activated_rows<T, kActivation>(p, {rank, count, of_wave[0] + wave}, {rank, count, of_wave[1] + wave});
  });
}

int launch_rows(const QuantizeActivatedParams& p, void* stream) {
  const int threads = round_up(ceil_div(int(p.h.F / n), kVecs), kLargestWarp);
  const int rows_each = threads < kUsualThreads ? kUsualThreads / threads : 1;
  const int64_t blocks = ceil_div<int64_t>(p.P, rows_each), most = kMaxBlocks / 2;
  const dim3 grid(unsigned(blocks < most ? blocks : most));
  return launch(quantize_activated_rows_kernel<Types>, {grid, dim3(threads, rows_each), stream}, p);
}

// ---- a scale for 128 elements: neighbouring lanes of a wave hold them -----------------------------------------------

constexpr int kVecsOfBlock = kBlock / n;

// Number v of the vectors of a row's parts, where `there`. Not live: a row between columns of scales, of zeros.
template <class T, class Held, class At>
MOE_DEVICE void quantize_blocks(const QuantizeParams& p, int64_t row, bool live, int v, bool there, const Held& held,
                                bool adjacent, At at) {
  constexpr int kParts = sizeof(Held) / sizeof(Vec16);
  const int lanes = kVecsOfBlock / (adjacent ? kParts : 1);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    uint32_t amax = max_vec<BF16>(0, held.part[part]);
    if (adjacent) amax = max_vec<BF16>(amax, held.part[kParts - 1 - part]);
    for (int mask = 1; mask < lanes; mask *= 2) amax = max_magnitude<BF16>(amax, shfl_xor(amax, mask));
    const auto s = T::template scale_of<ScaleF32>(p, amax_bits<BF16>(amax));
    if (!there) continue;
    const int vec = at(v, part);
    if (live) store_cast<T>(p, p.q + row * p.K, vec, held.part[part], s.multiplier);
    if (vec % kVecsOfBlock == 0)
      store_stream(static_cast<float*>(p.scale) + vec / kVecsOfBlock * scale_stride(p.rows) + row,
                   live ? s.dequant() : 0.f);
  }
}

template <class T, Activation kActivation>
MOE_DEVICE void quantize_activated_blocks(const QuantizeActivatedParams& p) {
  const GatesOf<kActivation> source(p.h);
  const int lane = threadIdx.x % kWarpSize, vecs = int(p.h.F / n);
  for (int64_t row = first_row(); row < scale_stride(p.P); row += rows_at_once()) {
    const bool live = row < p.P;
    const void* const from = source.row(row);
    for (int first = lane; first - lane < vecs; first += kVecs * kWarpSize) {
      typename GatesOf<kActivation>::Held h[kVecs] = {};
#pragma unroll
      for (int i = 0; i < kVecs; ++i)
        if (const int v = first + i * kWarpSize; live && v < vecs) h[i] = source.load(from, v);
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        const int v = first + i * kWarpSize;
        auto at_h = [&](int v, int part) { return int(source.columns.at(v, part) / n); };
        if (p.of_h.rows > 0) quantize_blocks<T>(p.of_h, row, live, v, v < vecs, h[i], source.columns.interleaved, at_h);
        const One a = activated_vec<kActivation>(source, from, h[i]);
        quantize_blocks<T>(p.of_a, row, live, v, v < vecs, a, false, [](int v, int) { return v; });
      }
    }
  }
}

template <class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 3)
    quantize_activated_blocks_kernel(MOE_GRID_CONSTANT const QuantizeActivatedParams p) {
  wait_for_previous_kernel();
  dispatch_activation(p.activation, [&](auto activation) {
    quantize_activated_blocks<T, decltype(activation)::value>(p);
  });
}

}  // namespace

bool can_quantize_activated(const QuantizeActivatedParams& p) {
  const bool whole = p.of_a.format == FormatId::kRowwise, blocks = p.of_a.format == FormatId::kBlockwise;
  return p.P > 0 && p.h.F > 0 && p.h.in == InType::kBF16 && is_fnuz(p.of_a.out) == device().native_fnuz &&
         is_of_vectors(p.h.h, p.h.stride, p.h.F, p.P, 2) &&
         ((whole && p.h.F <= kMostFeatures) || (blocks && p.h.F % kBlock == 0));
}

int quantize_activated(const QuantizeActivatedParams& p, void* stream) {
  if (p.of_a.format == FormatId::kRowwise) return launch_rows(p, stream);
  return launch_on_rows(quantize_activated_blocks_kernel<Types>, p, scale_stride(p.P), stream);
}

}  // namespace moe_fp8
