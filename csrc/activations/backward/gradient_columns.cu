// The second pass: dh and a along tokens. A block has 64 features of 256 positions, so that a column is stored 256
// bytes at a time; a row of threads 16 positions of each line, a lane eight features of four rows.
#include "activations/backward/gradients.h"
#include "platform/launch.h"
#include "primitives/transpose.h"

namespace moe_fp8 {
namespace {

// Two blocks a multiprocessor, 128 registers: inputs of 32 activations a thread are under way at once.
constexpr int kLines = 2, kTile = kLines * kLine, kVecs = 8, kColumns = kVecs * kFeatures;
constexpr int kColumnThreads = kLineChunks * kLanes;
constexpr int kRowsOfLane = 4;
constexpr int kMostTiles = 65535;  // of positions, a launch

struct GradientColumnsPlan : GradientsPlan {
  int last;  // tile of positions that the launch begins with: the L2 still has the last rows that the first pass read
};

template <int kParts>
using Stage = TransposeStage<(kParts + 1) * kColumns, kFeatures>;

// Of the lane: the word of its four rows in a column, number j of its eight.
template <int kParts>
MOE_DEVICE uint32_t& word_of(Stage<kParts>& stage, int part, int j) {
  return stage.at(part * kColumns + threadIdx.x % kVecs * kFeatures + j, threadIdx.y).w[threadIdx.x / kVecs];
}

// The chunk's rows; behind the last one it comes once more, and so does a row's last vector.
template <class T, class G>
MOE_DEVICE void cast_rows(const GradientsPlan& p, const ChunkRows& rows, Stage<G::kParts>& stage) {
  constexpr int kParts = G::kParts, kAtOnce = G::kLight ? 4 : 2;  // features, as registers are for
  using Multipliers = std::conditional_t<kAtOnce == 4, Vec16, Vec8>;
  const int F = int(p.gradients.h.F), v = Min{}(int(blockIdx.x * kVecs + threadIdx.x % kVecs), p.vecs - 1);
  G g[kRowsOfLane];
#pragma unroll
  for (int i = 0; i < kRowsOfLane; ++i)
    g[i] = G::template load<Reuse::kNone>(
        p, rows.row + Min{}(threadIdx.x / kVecs * kRowsOfLane + i, rows.count - 1), v);
  const float* multipliers = p.multipliers + rows.group * (kParts + 1) * F + v * kFeatures;
  T::with_cast(p.of_dh, [&](auto cast_dh) {
#pragma unroll 1
    for (int first = 0; first < kFeatures; first += kAtOnce, multipliers += kAtOnce) {
      Multipliers m[kParts + 1];
#pragma unroll
      for (int part = 0; part <= kParts; ++part)
        m[part] = *reinterpret_cast<const Multipliers*>(multipliers + part * F);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        float values[3][kRowsOfLane];
#pragma unroll
        for (int i = 0; i < kRowsOfLane; ++i) {
          const ActivationGradient of = g[i].of(j);
          values[0][i] = of.gate;
          if constexpr (kParts > 1) values[1][i] = of.up;
          values[kParts][i] = g[i].score * of.a;
        }
#pragma unroll
        for (int part = 0; part <= kParts; ++part) {
          const float by = as_float(m[part].w[j]);
          const auto scaled = [&](int i) { return as_float(packed_bf16(0, values[part][i])) * by; };
          word_of<kParts>(stage, part, first + j) =
              part < kParts ? cast_dh(scaled(0), scaled(1), scaled(2), scaled(3))
                            : cast4<kNativeE4M3>(scaled(0), scaled(1), scaled(2), scaled(3));
        }
      }
#pragma unroll
      for (int i = 0; i < kRowsOfLane; ++i) g[i].template advance<kAtOnce>();
    }
  });
}
// Zeros where the chunk has no rows.
template <int kParts>
MOE_DEVICE void clear_padding(const ChunkRows& rows, Stage<kParts>& stage) {
  const int there = rows.count - int(threadIdx.x / kVecs) * kRowsOfLane;
  if (there >= kRowsOfLane) return;
#pragma unroll 1
  for (int c = 0; c < (kParts + 1) * kFeatures; ++c) {
    uint32_t& word = word_of<kParts>(stage, c / kFeatures, c % kFeatures);
    word = there > 0 ? word & row_mask(0, there) : 0;
  }
}
template <int kParts>
MOE_DEVICE void store_columns(const GradientColumnsPlan& p, int first, Stage<kParts> (&stage)[kLines]) {
  constexpr int kChunks = kTile / kChunkRows, kStep = kColumnThreads / kChunks;
  const int t = threadIdx.y * kLanes + threadIdx.x, chunk = t % kChunks;
  const int64_t F = p.gradients.h.F, positions = p.of_dh.positions, position = first + chunk * kChunkRows;
  const int64_t feature = int64_t(blockIdx.x) * kColumns + t / kChunks;
  if (position >= positions) return;
#pragma unroll
  for (int part = 0; part <= kParts; ++part) {
    const bool of_a = part == kParts, in_turns = p.gradients.h.interleaved && !of_a;
    const int64_t column = in_turns ? 2 * feature + part : feature + (of_a ? 0 : part * F);
    uint8_t* out = (of_a ? p.of_a.q_t : p.of_dh.q_t) + column * positions + position;
#pragma unroll
    for (int c = 0; c < kColumns; c += kStep, out += (in_turns ? 2 : 1) * kStep * positions)
      if (feature + c < F)
        store_stream(reinterpret_cast<Vec16*>(out),
                     stage[chunk / kLineChunks].at(part * kColumns + t / kChunks + c, chunk % kLineChunks));
  }
}

template <class T, class Activations>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kColumnThreads, 2)
    quantize_gradient_columns_kernel(MOE_GRID_CONSTANT const GradientColumnsPlan p) {
  static_assert(Activations::kAlike);
  constexpr int kParts = Activations::kParts;
  __shared__ Stage<kParts> stage[kLines];
  const int first = (p.last - int(blockIdx.y)) * kTile;
  wait_for_previous_kernel();
  with_gradients<Activations>(p, [&](auto of) {
#pragma unroll 1
    for (int line = 0; line < kLines; ++line) {
      const int at = first + line * kLine + threadIdx.y * kChunkRows;
      if (at >= int(p.of_dh.positions)) break;
      const ChunkRows rows = p.chunks[at / kChunkRows];
      if (rows.count > 0) cast_rows<T, typename decltype(of)::Type>(p, rows, stage[line]);
      if (rows.count < kChunkRows) clear_padding<kParts>(rows, stage[line]);
    }
  });
  __syncthreads();
  store_columns<kParts>(p, first, stage);
}

}  // namespace

int launch_gradient_columns(const GradientsPlan& p, void* stream) {
  const unsigned blocks_across = unsigned(ceil_div<int64_t>(p.gradients.h.F, kColumns));
  const int tiles = int(ceil_div<int64_t>(p.of_dh.positions, kTile));
  for (GradientColumnsPlan plan = {p, tiles - 1}; plan.last >= 0; plan.last -= kMostTiles) {
    const int left = plan.last + 1;
    const dim3 blocks(blocks_across, left < kMostTiles ? left : kMostTiles);
    const Launch of_tiles = {blocks, dim3(kLanes, kLineChunks), stream};
    const int e = dispatch_gated(p.gradients.activation, [&](auto activations) {
      return launch(quantize_gradient_columns_kernel<GradientTypes, decltype(activations)>, of_tiles, plan);
    });
    if (e) return e;
  }
  return 0;
}

}  // namespace moe_fp8
