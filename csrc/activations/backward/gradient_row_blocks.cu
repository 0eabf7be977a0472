// Scales of blocks, along rows only: no column has a scale, so nothing is kept for longer than a few rows.
//
// THREAD MAP. A wave has kRows neighbouring rows, and a lane one vector of each: eight features of every projection.
// The waves of a row have neighbouring vectors. A lane group shares the scaling blocks of a vector of h.
//
//   features of a lane group        halves, or no ups        interleaved
//   blocks of 128 columns           128: 16 lanes            64: 8 lanes
//   blocks of 32 columns            32: 4 lanes              16: 2 lanes
//
// A lane group has kRows * kVectors maxima, and after their reduction kReplicas neighbouring lanes hold each.
#include "activations/backward/gradients.h"
#include "platform/launch.h"
#include "primitives/scale_sink.h"
#include "quantize/row.h"

namespace moe_fp8 {
namespace {

struct GradientRowBlocksPlan : GradientInputs {
  QuantizeParams quantize_dh;
  float* dots;            // [waves of a row, P], parts of dscores
  int64_t blocks;         // scaling blocks of a row
  int64_t stride;         // of the scales, see scale_sink.h
  ScaleOrder order;
};

// Runs before: gathers scores, and clears the gaps between columns of scales.
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kGradientPlaceThreads, 1)
    prepare_gradient_row_blocks_kernel(MOE_GRID_CONSTANT const GradientRowBlocksPlan p) {
  wait_for_previous_kernel();
  const int64_t thread = int64_t(blockIdx.x) * kGradientPlaceThreads + threadIdx.x;
  const int64_t threads = int64_t(gridDim.x) * kGradientPlaceThreads;
  gather_scores(p, thread, threads);
  if (p.order != ScaleOrder::kColumnMajor) return;
  const int64_t rows = p.quantize_dh.rows, gap = p.stride - rows;
  for (int64_t i = thread; i < p.blocks * gap; i += threads)
    static_cast<float*>(p.quantize_dh.scale)[i / gap * p.stride + rows + i % gap] = 0.f;
}

// Stores a scale where the format wants it, and behind the last one of a row the zeros that fill its 128x4 atom.
// `place` is the row's place among the scales; -1: none.
template <class Scale>
MOE_DEVICE void store_scale(const GradientRowBlocksPlan& p, int place, uint32_t block, Scale s) {
  void* const scales = p.quantize_dh.scale;
  if constexpr (std::is_same_v<Scale, ScaleF32>) {
    store_stream(ScaleSink<Scale, ScaleOrder::kColumnMajor>(scales, p.stride).at(place, block), s.stored());
  } else {
    if (place < 0) return;
    if (p.order == ScaleOrder::kRowMajor) {
      store_stream(ScaleSink<Scale, ScaleOrder::kRowMajor>(scales, p.stride).at(place, block), s.stored());
      return;
    }
    const ScaleSink<Scale, ScaleOrder::kBlocked> sink(scales, p.stride);
    store_stream(sink.at(place, block), s.stored());
    if (block + 1 == p.blocks)
      for (int64_t pad = p.blocks; pad < p.stride; ++pad) store_stream(sink.at(place, pad), uint8_t(0));
  }
}

// Rows that a wave takes at once.
template <class Scale>
MOE_HD constexpr int rows_of_wave(bool light) { return std::is_same_v<Scale, ScaleF32> ? row_pass_rows(light) : 2; }

// Out-of-range rows repeat the last one: the same bytes. Out-of-range vectors repeat the last one, which changes no
// maximum of its lane group.
template <class T, class Scale, class G>
MOE_DEVICE void quantize_gradient_rows(const GradientRowBlocksPlan& p, int wave_row, int first_vec) {
  constexpr int kSize = std::is_same_v<Scale, ScaleF32> ? kBlock : kMxBlock;
  constexpr int kVectors = G::kVectors, kVectorColumns = G::kColumns / kVectors;
  constexpr int kRows = rows_of_wave<Scale>(G::kLight);
  constexpr int kGroup = kSize / kVectorColumns, kMaxima = kRows * kVectors, kReplicas = kGroup / kMaxima;
  const int lane = threadIdx.x % kWarpSize, vec = first_vec + lane, v = Min{}(vec, p.vecs - 1);
  const int last = int(p.quantize_dh.rows) - 1;
  const auto row = [&](int i) { return Min{}(wave_row * kRows + i, last); };
  if (wave_row * kRows > last || first_vec >= p.vecs) return;
  G g[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const RowScales scales = p.gradients.h.scale.scales_of_row(row(i));
    const int64_t first = scales.offset(uint32_t(v * kVectorColumns) / kSize);
    const int64_t distance = scales.offset(uint32_t(p.vecs * kFeatures) / kSize);  // to the second half of h
    g[i] = G::template load<Reuse::kNone>(p, row(i), v, [&](int vector) {
      return scales.value(scales.bits_at(first + vector * distance));
    });
  }
  typename G::Pairs dh[kRows];
  float dots[kRows];
  uint32_t maxima[kMaxima];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    uint32_t a[kFeatures / 2];
    dots[i] = g[i].round([&](int j) { return g[i].gradient(p, j); }, dh[i], a);
    if (vec >= p.vecs) dots[i] = 0;
    g[i].keep(p, row(i), v, dh[i], a);
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      constexpr int kWords = kVectorColumns / 2;
      uint32_t max = dh[i][vector * kWords];
#pragma unroll
      for (int w = 1; w < kWords; ++w) max = max_magnitude<BF16>(max, dh[i][vector * kWords + w]);
      maxima[i * kVectors + vector] = max;
    }
  }
  const float dot = reduce_scatter_sum(dots);
  if (const int i = reduce_scatter_sum_index<kRows>(lane); lane < kRows && wave_row * kRows + i <= last)
    store_stream(p.dots + first_vec / kWarpSize * p.quantize_dh.rows + row(i), dot);
  uint32_t amax;
  if constexpr (kMaxima == 1) amax = amax_bits<BF16>(reduce_lanes<kGroup>(maxima[0], MaxMagnitude<BF16>{}));
  else amax = amax_of_rows<BF16, kGroup>(maxima, lane % kGroup);
  const Scale s = T::template scale_of<Scale>(p.quantize_dh, amax);
  const int at = lane % kGroup / kReplicas, vector = at % kVectors;
  if (lane % kReplicas == 0 && vec - lane % kGroup < p.vecs) {
    const int r = row(at / kVectors), place = p.quantize_dh.scratch ? p.quantize_dh.scratch[r] : r;
    const uint32_t block = uint32_t(v * kVectorColumns + vector * p.vecs * kFeatures) / kSize;
    store_scale(p, place, block, s);
  }
  T::with_cast(p.quantize_dh, [&](auto cast) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float m[kVectors];
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector)
        m[vector] = as_float(shfl(as_bits(s.multiplier),
                                  lane / kGroup * kGroup + (i * kVectors + vector) * kReplicas));
      if (vec < p.vecs) G::store(p, p.quantize_dh, dh[i], row(i), v, m, cast);
    }
  });
}

// Casts in software take more registers: with two resident blocks they spill.
template <class T, class Scale, class Activations>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kRowBlocksTeam, kCastsInHardware ? kRowBlocksResident : 1)
    quantize_gradient_row_blocks_kernel(MOE_GRID_CONSTANT const GradientRowBlocksPlan p) {
  wait_for_previous_kernel();
  const int waves = ceil_div(p.vecs, kWarpSize);
  const int64_t wave = int64_t(blockIdx.x) * (kRowBlocksTeam / kWarpSize) + threadIdx.x / kWarpSize;
  with_gradients<Activations>(p, [&](auto type) {
    quantize_gradient_rows<T, Scale, typename decltype(type)::Type>(p, int(wave / waves),
                                                                    int(wave % waves) * kWarpSize);
  });
}

// Sums the waves' parts of dscores, in the order of activate_backward.cu.
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kDscoresSumThreads, 1)
    sum_gradient_row_blocks_kernel(MOE_GRID_CONSTANT const GradientRowBlocksPlan p) {
  wait_for_previous_kernel();
  const int64_t rows = p.quantize_dh.rows, row = int64_t(blockIdx.x) * kDscoresSumThreads + threadIdx.x;
  const int slot = row < rows ? p.gradients.slot(row) : -1;
  if (slot < 0) return;
  float sum = 0;
  for (int first = 0, wave = 0; first < p.vecs; first += kWarpSize, ++wave) sum += p.dots[wave * rows + row];
  store_element(p.gradients.dscores, InType::kF32, slot, sum);
}

int64_t waves_of_row(const QuantizeActivatedBackwardParams& p) {
  return ceil_div<int64_t>(p.gradients.h.F, kFeatures * kMinWarpSize);
}
int64_t grid_of(const QuantizeActivatedBackwardParams& p) {
  const bool light = is_light(kActivations[int(p.gradients.activation)].curve);
  const bool floats = format_of(p.quantize_dh.format).scale_type == ScaleType::kF32;
  const int rows = floats ? rows_of_wave<ScaleF32>(light) : rows_of_wave<ScaleE8M0>(light);
  const int64_t waves = waves_of_row(p) * ceil_div<int64_t>(p.quantize_dh.rows, rows);
  return ceil_div<int64_t>(waves, kRowBlocksTeam / kMaxWarpSize);
}
// Words of the places of rows, behind the scores.
int64_t place_words(const QuantizeActivatedBackwardParams& p) {
  return round_up<int64_t>(scratch_words(p.quantize_dh), 4);
}

}  // namespace

int64_t gradient_row_blocks_words(const QuantizeActivatedBackwardParams& p) {
  return place_words(p) + waves_of_row(p) * p.quantize_dh.rows;
}

bool can_take_gradient_row_blocks(const QuantizeActivatedBackwardParams& p) {
  return has_whole_blocks(p.gradients) && grid_of(p) <= max_grid_blocks(kRowBlocksTeam);
}

int launch_gradient_row_blocks(const QuantizeActivatedBackwardParams& params, void* stream) {
  auto* const scores = reinterpret_cast<float*>(params.scratch);
  GradientRowBlocksPlan p = {gradient_inputs(params.gradients, scores), params.quantize_dh};
  const Format& f = format_of(p.quantize_dh.format);
  float* const places = scores + score_words(params.gradients);
  p.quantize_dh.scratch = place_words(params) ? reinterpret_cast<int*>(places) : nullptr;
  p.dots = places + place_words(params);
  p.blocks = f.blocks(p.quantize_dh.K);
  p.order = f.order;
  p.stride = f.order == ScaleOrder::kColumnMajor ? scale_stride(p.quantize_dh.rows)
             : f.blocked()                       ? padded_scale_columns(p.blocks)
                                                 : p.blocks;
  const Launch few = {dim3(unsigned(device().multiprocessors)), dim3(kGradientPlaceThreads), stream};
  if (const int e = launch(prepare_gradient_row_blocks_kernel, few, p)) return e;
  if (const int e = place_rows(p.quantize_dh, stream)) return e;
  const Launch l = {dim3(unsigned(grid_of(params))), dim3(kRowBlocksTeam), stream};
  const int e = dispatch_gated(params.gradients.activation, [&](auto activations) {
    using Activations = decltype(activations);
    return f.scale_type == ScaleType::kF32
               ? launch(quantize_gradient_row_blocks_kernel<GradientTypes, ScaleF32, Activations>, l, p)
               : launch(quantize_gradient_row_blocks_kernel<GradientTypes, ScaleE8M0, Activations>, l, p);
  });
  if (e) return e;
  const auto blocks = unsigned(ceil_div<int64_t>(p.quantize_dh.rows, kDscoresSumThreads));
  return launch(sum_gradient_row_blocks_kernel, {dim3(blocks), dim3(kDscoresSumThreads), stream}, p);
}

}  // namespace moe_fp8
