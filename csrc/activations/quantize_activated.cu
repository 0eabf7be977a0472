#include "activations/quantize_activated.h"

#include "activations/gates.h"
#include "activations/launch.h"
#include "quantize/row.h"

namespace moe_fp8 {
namespace {

// Both kernels are bound by arithmetic, some 50 operations an activation with its casts and those of h.
using Types = Fast<BF16, Kind::kEither>;
using Part = Vectors<BF16>;
template <Activation kActivation>
using GatesOf = PlainGates<Part, is_gated(kActivation)>;
using Activations = PlainGates<Part, false>::Held;  // a vector
constexpr int n = Part::kElements;
constexpr int kVecs = 2;  // of each part of a row, a thread

template <Activation kActivation>
MOE_DEVICE Activations activated_vec(const GatesOf<kActivation>& source, const void* row,
                                     const typename GatesOf<kActivation>::Held& h) {
  const Gates<n> gates = source.values(row, h);
  float a[n];
#pragma unroll
  for (int j = 0; j < n; ++j) a[j] = activated<kActivation>(gates.gate[j], gates.up[j]);
  return {{Part::rounded(a)}};
}

// ---- a scale a row, which a team of threads holds in registers ------------------------------------------------------

constexpr int kMostThreads = 512, kUsualThreads = 256;  // of a row; of a block of several
constexpr int64_t kMostFeatures = int64_t(kMostThreads) * kVecs * n;

// at(v, part): where among the row's vectors one lies.
template <class T, class Held, class At>
MOE_DEVICE void quantize_whole(const QuantizeParams& p, const RowTeam& team, int64_t row, int vecs,
                               const Held (&held)[kVecs], At at) {
  constexpr int kParts = sizeof(Held) / sizeof(Vec16);
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i)
#pragma unroll
    for (int part = 0; part < kParts; ++part) amax = max_vec<BF16>(amax, held[i].part[part]);
  const auto s = T::template scale_of<ScaleF32>(p, team.max(amax_bits<BF16>(amax)));
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int v = i * team.count + team.rank;
    if (v >= vecs) break;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      store_cast<T>(p, p.q + row * p.K, at(v, part), held[i].part[part], s.multiplier);
  }
  if (vecs > 0 && team.rank == 0) static_cast<float*>(p.scale)[row] = s.dequant();
}

// of_h, of_a: the same threads, with words of their own for the waves' maxima.
template <class T, Activation kActivation>
MOE_DEVICE void quantize_activated_rows(const QuantizeActivatedParams& p, const RowTeam& of_h, const RowTeam& of_a) {
  const GatesOf<kActivation> source(p.h);
  const int first_of_wave = of_a.rank / kWarpSize * kWarpSize;
  const int64_t rows = p.of_a.rows;
  for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < rows; first += int64_t(gridDim.x) * blockDim.y) {
    const int64_t row = first + threadIdx.y;
    const int vecs = row < rows ? int(p.h.F / n) : 0;
    const void* const from = source.row(row);
    typename GatesOf<kActivation>::Held h[kVecs] = {};
    Activations a[kVecs] = {};
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      if (const int v = i * of_h.count + of_h.rank; v < vecs) h[i] = source.load(from, v);
    auto at_h = [&](int v, int part) { return int(source.columns.at(v, part) / n); };
    if (p.of_h.rows > 0) quantize_whole<T>(p.of_h, of_h, row, vecs, h, at_h);
    else __syncthreads();  // another wave may still read what this one said of its last row
#pragma unroll
    for (int i = 0; i < kVecs; ++i)  // whole waves have nothing to do where rows are short
      if (i * of_a.count + first_of_wave < vecs) a[i] = activated_vec<kActivation>(source, from, h[i]);
    quantize_whole<T>(p.of_a, of_a, row, vecs, a, [](int v, int) { return v; });
  }
}

// Two blocks of the most threads, 64 registers: their loads are 64 KB under way.
template <class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kMostThreads, 2)
    quantize_activated_rows_kernel(MOE_GRID_CONSTANT const QuantizeActivatedParams p) {
  __shared__ uint32_t of_wave[2][kMostThreads / 32];
  const int rank = int(threadIdx.x), count = int(blockDim.x), wave = int(threadIdx.y) * count / kWarpSize;
  const RowTeam of_h = {rank, count, of_wave[0] + wave}, of_a = {rank, count, of_wave[1] + wave};
  wait_for_previous_kernel();
  with_activation(p.activation, [&](auto activation) {
    quantize_activated_rows<T, decltype(activation)::value>(p, of_h, of_a);
  });
}

int launch_whole(const QuantizeActivatedParams& p, void* stream) {
  const int threads = round_up(ceil_div(int(p.h.F / n), kVecs), kLargestWarp);
  const int rows_each = threads < kUsualThreads ? kUsualThreads / threads : 1;
  const int64_t blocks = ceil_div<int64_t>(p.of_a.rows, rows_each);
  const int64_t most = kMaxBlocks * kThreads / kMostThreads;  // as many threads as launch_on_rows() starts
  const dim3 grid(unsigned(blocks < most ? blocks : most));
  return launch(quantize_activated_rows_kernel<Types>, {grid, dim3(threads, rows_each), stream}, p);
}

// ---- a scale for 128 elements, which neighbouring lanes of a wave hold ----------------------------------------------

constexpr int kVecsOfBlock = kBlock / n, kQuad = 4;

// Of so many neighbouring lanes, at most those of a block.
MOE_DEVICE uint32_t amax_of_block(uint32_t word, int lanes) {
#pragma unroll
  for (int mask = 1; mask < kVecsOfBlock; mask *= 2)
    if (mask < lanes) word = max_magnitude<BF16>(word, shfl_xor(word, mask));
  return word;
}

// Number v of the vectors of h's parts and that of a, by whole waves. All lanes of a block know its amax; each of four
// makes one scale, of a part of h or of a, for a division costs as much as the casts. Rows between columns of scales
// have scales of zero and nothing else.
template <class T, class Gates>
MOE_DEVICE void quantize_vecs(const QuantizeActivatedParams& p, int64_t row, int v,
                              const typename Gates::Columns& columns, const typename Gates::Held& h,
                              const Activations& a) {
  constexpr int kParts = Gates::Columns::kParts, kOfA = kParts;
  const bool one_block = kParts == 2 && columns.interleaved;  // has both parts
  const int lanes = one_block ? kVecsOfBlock / 2 : kVecsOfBlock;
  uint32_t amax[kParts];
#pragma unroll
  for (int part = 0; part < kParts; ++part) amax[part] = max_vec<BF16>(0, h.part[part]);
  if (one_block) amax[0] = amax[kParts - 1] = max_magnitude<BF16>(amax[0], amax[kParts - 1]);
#pragma unroll
  for (int part = 0; part < kParts; ++part) amax[part] = amax_of_block(amax[part], lanes);
  const uint32_t amax_of_a = amax_of_block(max_vec<BF16>(0, a.part[0]), kVecsOfBlock);

  const int lane = threadIdx.x % kWarpSize, own = lane % kQuad;
  const uint32_t of_own = own == 0 ? amax[0] : own < kParts ? amax[kParts - 1] : amax_of_a;
  const auto s = T::template scale_of<ScaleF32>(p.of_a, amax_bits<BF16>(of_own));
  auto multiplier = [&](int of) { return as_float(shfl(as_bits(s.multiplier), lane - own + of)); };
  const bool live = row < p.of_a.rows, there = v < p.h.F / n, keeps = p.of_h.rows > 0;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const float m = multiplier(part);
    if (keeps && live && there)
      store_cast<T>(p.of_h, p.of_h.q + row * p.of_h.K, int(columns.at(v, part) / n), h.part[part], m);
  }
  const float m = multiplier(kOfA);
  if (live && there) store_cast<T>(p.of_a, p.of_a.q + row * p.of_a.K, v, a.part[0], m);

  auto store_scale = [&](const QuantizeParams& to, int64_t block) {
    store_stream(static_cast<float*>(to.scale) + block * scale_stride(p.of_a.rows) + row, live ? s.dequant() : 0.f);
  };
  if (!there) return;
  if (own == kOfA && lane % kVecsOfBlock < kQuad) store_scale(p.of_a, v / kVecsOfBlock);
  const int scales_of_h = one_block ? 1 : kParts;
  if (keeps && own < scales_of_h && lane % lanes < kQuad) store_scale(p.of_h, columns.at(v, own) / kBlock);
}

template <class T, Activation kActivation>
MOE_DEVICE void quantize_activated_blocks(const QuantizeActivatedParams& p) {
  const GatesOf<kActivation> source(p.h);
  const int lane = threadIdx.x % kWarpSize, vecs = int(p.h.F / n);
  for (int64_t row = first_row(); row < scale_stride(p.of_a.rows); row += rows_at_once()) {
    const void* const from = source.row(row);
    for (int first = 0; first < vecs; first += kVecs * kWarpSize) {
      typename GatesOf<kActivation>::Held h[kVecs] = {};
#pragma unroll
      for (int i = 0; i < kVecs; ++i)
        if (const int v = first + i * kWarpSize + lane; row < p.of_a.rows && v < vecs) h[i] = source.load(from, v);
#pragma unroll
      for (int i = 0; i < kVecs; ++i)
        if (const int v = first + i * kWarpSize; v < vecs)
          quantize_vecs<T, GatesOf<kActivation>>(p, row, v + lane, source.columns, h[i],
                                                 activated_vec<kActivation>(source, from, h[i]));
    }
  }
}

template <class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 3)
    quantize_activated_blocks_kernel(MOE_GRID_CONSTANT const QuantizeActivatedParams p) {
  wait_for_previous_kernel();
  with_activation(p.activation,
                  [&](auto activation) { quantize_activated_blocks<T, decltype(activation)::value>(p); });
}

}  // namespace

bool can_quantize_activated(const QuantizeActivatedParams& p) {
  const bool whole = p.of_a.format == FormatId::kRowwise, blocks = p.of_a.format == FormatId::kBlockwise;
  return p.of_a.rows > 0 && p.h.F > 0 && p.h.in == InType::kBF16 && is_fnuz(p.of_a.out) == device().native_fnuz &&
         is_of_vectors(p.h.h, p.h.stride, p.h.F, p.of_a.rows, 2) &&
         ((whole && p.h.F <= kMostFeatures) || (blocks && p.h.F % kBlock == 0));
}

int quantize_activated(const QuantizeActivatedParams& p, void* stream) {
  if (p.of_a.format == FormatId::kRowwise) return launch_whole(p, stream);
  return launch_on_rows(quantize_activated_blocks_kernel<Types>, p, scale_stride(p.of_a.rows), stream);
}

}  // namespace moe_fp8
