// The pass by columns: dh and a along tokens.
//
// THREAD MAP. A block has 64 features of 256 positions: kColumnPassLines lines of 128, so that a column is stored 256
// bytes at a time. Thread (x, y) computes positions 16 y + 4 (x / 8) and the next three of each line, of the eight
// features 8 (x % 8) and up; a word of the stage is those four positions of one column.
//
// Sums of dh: a thread sums its four rows, then the lanes x, x + 8, x + 16 and x + 24 sum the 16 rows of a chunk. Each
// of these lanes gets one feature of a step (of steps of two features, the first two lanes do), and stores its sums.
#include "activations/backward/gradients.h"
#include "platform/launch.h"
#include "primitives/row_reduce.h"
#include "primitives/transpose.h"

namespace moe_fp8 {
namespace {

constexpr int kLines = kColumnPassLines, kPositions = kLines * kLine;  // of a block
constexpr int kVecs = kColumnPassVecs, kFeaturesPerBlock = kVecs * kFeatures;
constexpr int kColumnThreads = kLineChunks * kLanes;
constexpr int kLaneRows = 4;      // the bytes of a word

struct GradientColumnsPlan : GradientsPlan {
  int last;  // tile of positions that blockIdx.y 0 takes: the L2 still holds the last rows that the pass by rows read
};

template <int kOutputs>
using Stage = TransposeStage<kOutputs * kFeaturesPerBlock, kFeatures>;

// The word of the lane's four rows, in column j of its eight columns of an output.
template <int kOutputs>
MOE_DEVICE uint32_t& word_of(Stage<kOutputs>& stage, int output, int j) {
  return stage.at(output * kFeaturesPerBlock + threadIdx.x % kVecs * kFeatures + j, threadIdx.y)
      .w[threadIdx.x / kVecs];
}

// Sums the four lanes' sums of kStep features from feature `first` of their vector on, and stores them. chunk -1: does
// not store them.
template <int kStep, int kProjections>
MOE_DEVICE void store_sums(const GradientsPlan& p, int chunk, int first, const float (&sums)[kProjections][kStep]) {
  constexpr int kStride = kVecs;  // between these lanes
  const int rank = threadIdx.x / kStride, vec = int(blockIdx.x) * kVecs + int(threadIdx.x) % kVecs;
  const int j = kStep == 4 ? rank % 2 * 2 + rank / 2 : rank % 2;
  float sum[kProjections];
#pragma unroll
  for (int i = 0; i < kProjections; ++i)
    sum[i] = reduce_scatter_step<kStride, kLanes, LaneOrder::kNearFirst>(sums[i], threadIdx.x, SumF32{});
  if (vec >= p.vecs || rank >= kStep || chunk < 0) return;
  float* const to = p.partial_sums +
                    (chunk * p.gradients.h.F + vec * kFeatures + first + j) * kProjections;
  if constexpr (kProjections == 2) *reinterpret_cast<Vec8*>(to) = {{as_bits(sum[0]), as_bits(sum[1])}};
  else *to = sum[0];
}

// Computes and casts the rows of a chunk. Out-of-range rows and vectors repeat the last ones: no branch.
// `summed` of the rows belong to the sums of dh, which are stored for this chunk if there are any.
template <class T, class G, bool kSums>
MOE_DEVICE void cast_rows(const GradientsPlan& p, const ChunkRows& rows, [[maybe_unused]] int summed,
                          [[maybe_unused]] int chunk, Stage<G::kOutputs>& stage) {
  constexpr int kProjections = G::kProjections, kOutputs = G::kOutputs, kStep = column_pass_features(G::kLight);
  using Multipliers = std::conditional_t<kStep == 4, Vec16, Vec8>;
  const int F = int(p.gradients.h.F), v = Min{}(int(blockIdx.x * kVecs + threadIdx.x % kVecs), p.vecs - 1);
  G g[kLaneRows];
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i)
    g[i] = G::template load<Reuse::kNone>(
        p, rows.row + Min{}(threadIdx.x / kVecs * kLaneRows + i, rows.count - 1), v);
  const float* multipliers = p.multipliers + rows.group * kOutputs * F + v * kFeatures;
  T::with_cast(p.quantize_dh, [&](auto cast_dh) {
#pragma unroll 1
    for (int first = 0; first < kFeatures; first += kStep, multipliers += kStep) {
      Multipliers m[kOutputs];
#pragma unroll
      for (int output = 0; output < kOutputs; ++output)
        m[output] = *reinterpret_cast<const Multipliers*>(multipliers + output * F);
      [[maybe_unused]] float sums[kProjections][kStep];
#pragma unroll
      for (int j = 0; j < kStep; ++j) {
        float values[3][kLaneRows];
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
          const ActivationGradient gradient = g[i].gradient(p, j);
          values[0][i] = gradient.gate;
          if constexpr (kProjections > 1) values[1][i] = gradient.up;
          values[kProjections][i] = g[i].score * gradient.a;
        }
#pragma unroll
        for (int output = 0; output < kOutputs; ++output) {
          const float multiplier = as_float(m[output].w[j]);
          const auto rounded = [&](int i) { return as_float(packed_bf16(0, values[output][i])); };
          const auto scaled = [&](int i) { return rounded(i) * multiplier; };
          if constexpr (kSums)
            if (output < kProjections) {
              const int valid_rows = summed - int(threadIdx.x / kVecs) * kLaneRows;
              const auto value = [&](int i) { return i < valid_rows ? rounded(i) : 0.f; };
              sums[output][j] = (value(0) + value(1)) + (value(2) + value(3));
            }
          word_of<kOutputs>(stage, output, first + j) =
              output < kProjections ? cast_dh(scaled(0), scaled(1), scaled(2), scaled(3))
                                    : cast4<kNativeE4M3>(scaled(0), scaled(1), scaled(2), scaled(3));
        }
      }
      if constexpr (kSums) store_sums<kStep, kProjections>(p, summed > 0 ? chunk : -1, first, sums);
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) g[i].template advance<kStep>();
    }
  });
}
// Shuffles take whole waves. If a wave has two rows of threads, and one of them has no rows, it computes the rows of
// the other one: nothing of them is summed, and what they leave in the stage is cleared or not stored.
template <bool kSums>
constexpr bool kSharesWave = kSums && kWarpSize > kLanes;
MOE_DEVICE ChunkRows rows_for_wave(const ChunkRows& rows) {
  const int other[] = {shfl_xor(rows.group, kWarpSize / 2), shfl_xor(rows.row, kWarpSize / 2),
                       shfl_xor(rows.count, kWarpSize / 2)};
  return rows.count > 0 ? rows : ChunkRows{other[0], other[1], other[2], 0};
}
// Writes zeros where the chunk has no rows.
template <int kOutputs>
MOE_DEVICE void clear_padding(const ChunkRows& rows, Stage<kOutputs>& stage) {
  const int valid_rows = rows.count - int(threadIdx.x / kVecs) * kLaneRows;
  if (valid_rows >= kLaneRows) return;
#pragma unroll 1
  for (int c = 0; c < kOutputs * kFeatures; ++c) {
    uint32_t& word = word_of<kOutputs>(stage, c / kFeatures, c % kFeatures);
    word = valid_rows > 0 ? word & row_mask(0, valid_rows) : 0;
  }
}
template <int kOutputs>
MOE_DEVICE void store_columns(const GradientColumnsPlan& p, int first, Stage<kOutputs> (&stage)[kLines]) {
  constexpr int kChunks = kPositions / kChunkRows, kStep = kColumnThreads / kChunks;
  const int t = threadIdx.y * kLanes + threadIdx.x, chunk = t % kChunks;
  const int64_t F = p.gradients.h.F, positions = p.quantize_dh.positions, position = first + chunk * kChunkRows;
  const int64_t feature = int64_t(blockIdx.x) * kFeaturesPerBlock + t / kChunks;
  if (position >= positions) return;
#pragma unroll
  for (int output = 0; output < kOutputs; ++output) {
    const bool is_a = output == kOutputs - 1, interleaved = p.gradients.h.interleaved && !is_a;
    const int64_t column = interleaved ? 2 * feature + output : feature + (is_a ? 0 : output * F);
    uint8_t* out = (is_a ? p.quantize_a.q_t : p.quantize_dh.q_t) + column * positions + position;
#pragma unroll
    for (int c = 0; c < kFeaturesPerBlock; c += kStep, out += (interleaved ? 2 : 1) * kStep * positions)
      if (feature + c < F)
        store_stream(reinterpret_cast<Vec16*>(out),
                     stage[chunk / kLineChunks].at(output * kFeaturesPerBlock + t / kChunks + c, chunk % kLineChunks));
  }
}

template <class T, class Activations, bool kSums>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kColumnThreads, kColumnPassBlocks)
    quantize_gradient_columns_kernel(MOE_GRID_CONSTANT const GradientColumnsPlan p) {
  static_assert(Activations::kUniform);
  constexpr int kOutputs = Activations::kProjections + 1;
  __shared__ Stage<kOutputs> stage[kLines];
  const int first = (p.last - int(blockIdx.y)) * kPositions;
  wait_for_previous_kernel();
  with_gradients<Activations>(p, [&](auto type) {
#pragma unroll 1
    for (int line = 0; line < kLines; ++line) {
      const int at = first + line * kLine + threadIdx.y * kChunkRows;
      const bool inside = at < int(p.quantize_dh.positions);
      if (!kSharesWave<kSums> && !inside) break;
      const ChunkRows rows = inside ? p.chunks[at / kChunkRows] : ChunkRows{};
      const ChunkRows computed = kSharesWave<kSums> ? rows_for_wave(rows) : rows;
      if (computed.count > 0)
        cast_rows<T, typename decltype(type)::Type, kSums>(p, computed, rows.count, at / kChunkRows, stage[line]);
      if (rows.count < kChunkRows) clear_padding<kOutputs>(rows, stage[line]);
    }
  });
  __syncthreads();
  store_columns<kOutputs>(p, first, stage);
}

}  // namespace

int launch_gradient_columns(const GradientsPlan& p, void* stream) {
  const unsigned grid_x = unsigned(ceil_div<int64_t>(p.gradients.h.F, kFeaturesPerBlock));
  const int tiles = int(ceil_div<int64_t>(p.quantize_dh.positions, kPositions));
  for (GradientColumnsPlan plan = {p, tiles - 1}; plan.last >= 0; plan.last -= kMaxGridBlocksY) {
    const int left = plan.last + 1;
    const Launch l = {dim3(grid_x, left < kMaxGridBlocksY ? left : kMaxGridBlocksY), dim3(kLanes, kLineChunks), stream};
    const int e = dispatch_gated(p.gradients.activation, [&](auto activations) {
      using Activations = decltype(activations);
      return p.partial_sums ? launch(quantize_gradient_columns_kernel<GradientTypes, Activations, true>, l, plan)
                            : launch(quantize_gradient_columns_kernel<GradientTypes, Activations, false>, l, plan);
    });
    if (e) return e;
  }
  return 0;
}

}  // namespace moe_fp8
