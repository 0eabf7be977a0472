// Quantizes rows of x and finds the amax of its columns, from one read. Blocks walk rows; a thread has the same vector
// of every row.
#include "platform/launch.h"
#include "primitives/groups.h"
#include "primitives/row_reduce.h"
#include "quantize/batch_columns_plan.h"
#include "quantize/row.h"

namespace moe_fp8 {
namespace {

using Types = TypesOf<BF16>;
constexpr int kRows = kWarpSize == 32 ? 4 : 2;                // rows at once that registers allow
constexpr int kLanesPerRow = kWarpSize / kRows;               // lanes of a wave that end up with the amax of a row
constexpr int kMaxRowThreads = kLongestBatchRow / Types::kVec;  // threads of a row; a multiprocessor holds so many
constexpr int kMinBlockThreads = 256;                         // threads of a block: shorter rows share one

struct BatchRowsPlan : BatchColumnsPlan {
  int blocks;  // blocks of a range of rows
  int vecs;    // vectors of a row
};

// A word of two elements, with zero in place of an element that is not finite.
template <class In>
MOE_DEVICE uint32_t finite_word(uint32_t word) {
  static_assert(kPerWord<In> == 2);
  const auto mask = [&](int i, uint32_t half) { return magnitude_bits<In>(word, i) < F32::kInfinity ? half : 0; };
  return word & (mask(0, 0xffffu) | mask(1, 0xffff0000u));
}

// Maxima that the waves of a row exchange. Double-buffered: a slow wave may still read the previous rows' values.
using WaveAmax = uint32_t[2][kRows][kMaxRowThreads / 32];

// The rows of a range that a block walks. The blocks of a range take turns, each with kRows rows for each of its row
// teams. Out-of-range rows repeat the last row, and out-of-range threads the last vector: same maxima, same bytes, no
// branch.
template <class T>
struct BatchWalk {
  using In = typename T::In;
  const BatchRowsPlan& p;
  int begin, end, step, v;
  uint32_t column_amax[4] = {};  // of the thread's columns, two to a word

  struct Rows {
    Vec16 x[kRows];
    int is_used[kRows];
  };

  MOE_DEVICE explicit BatchWalk(const BatchRowsPlan& p) : p(p) {
    const int rows = kRows * int(blockDim.y), range = int(blockIdx.x) / p.blocks, block = int(blockIdx.x) % p.blocks;
    const auto row_at = [&](int64_t row) { return int(row < p.x_rows ? row : p.x_rows); };
    begin = row_at(int64_t(range) * p.range_rows + block * rows);
    end = row_at(int64_t(range + 1) * p.range_rows);
    step = p.blocks * rows;
    v = Min{}(int(threadIdx.x), p.vecs - 1);
  }
  MOE_DEVICE int row(int at, int i) const { return Min{}(at + int(threadIdx.y) + i * int(blockDim.y), end - 1); }
  MOE_DEVICE Rows load(int at) const {
    Rows rows;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      rows.x[i] = load_vec<T>(p, find_element<T>(p, row(at, i) * p.row_stride), v);
      rows.is_used[i] = p.is_used[row(at, i)];
    }
    return rows;
  }
  MOE_DEVICE void update_max(const Vec16& x, bool finite) {
#pragma unroll
    for (int w = 0; w < 4; ++w)
      column_amax[w] = max_magnitude<In>(column_amax[w], finite ? x.w[w] : finite_word<In>(x.w[w]));
  }
  MOE_DEVICE void walk(WaveAmax& wave_amax) {
    const int lane = threadIdx.x % kWarpSize, row_of_lane = lane / kLanesPerRow, rank_of_lane = lane % kLanesPerRow;
    const int waves = blockDim.x / kWarpSize, team = threadIdx.y * waves;
    Rows rows = load(begin);
    for (int at = begin, buffer = 0; at < end; at += step, buffer ^= 1) {
      uint32_t* const row_partials = wave_amax[buffer][row_of_lane] + team;
      uint32_t amax = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        if (const uint32_t max = wave_max(amax_bits<In>(max_vec<In>(rows.x[i]))); i == row_of_lane) amax = max;
      if (rank_of_lane == 0) row_partials[threadIdx.x / kWarpSize] = amax;
      const Rows next = load(at + step);  // in flight while the team exchanges maxima and casts
      if (waves > 1) __syncthreads();
      else wave_barrier();
      for (int w = rank_of_lane; w < waves; w += kLanesPerRow) amax = MaxU32{}(amax, row_partials[w]);
      amax = reduce_lanes<kLanesPerRow>(amax, MaxU32{});
      const auto s = T::template scale_of<ScaleF32>(p, amax);
      if (threadIdx.x < kWarpSize && rank_of_lane == 0)
        store_stream(row_scales(p).at(row(at, row_of_lane), 0), s.stored());
      T::with_cast(p, [&](auto cast) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const float multiplier = as_float(shfl(as_bits(s.multiplier), i * kLanesPerRow));
          store_cast<T>(p, p.q + row(at, i) * p.K, v, rows.x[i], multiplier, cast);
          if (rows.is_used[i]) update_max(rows.x[i], multiplier == multiplier);
        }
      });
      rows = next;
    }
  }
};

template <class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kMaxRowThreads, 1)
    quantize_batch_rows_kernel(MOE_GRID_CONSTANT const BatchRowsPlan p) {
  MOE_DYNAMIC_SMEM(smem);
  auto* const column_amax = reinterpret_cast<uint32_t*>(smem);  // [K]
  __shared__ WaveAmax wave_amax;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  for (int c = thread; c < p.K; c += threads) column_amax[c] = 0;
  __syncthreads();
  wait_for_previous_kernel();
  BatchWalk<T> block(p);
  block.walk(wave_amax);
#pragma unroll
  for (int i = 0; i < T::kVec; ++i)
    atomicMax(column_amax + block.v * T::kVec + i, magnitude_bits<typename T::In>(block.column_amax[i / 2], i % 2));
  __syncthreads();
  for (int c = thread; c < p.K; c += threads)
    if (column_amax[c] > 0) atomicMax(p.amax + c, column_amax[c]);
}

}  // namespace

int launch_batch_rows(const BatchColumnsPlan& columns, void* stream) {
  BatchRowsPlan p = {columns};
  p.vecs = int(p.K / Types::kVec);
  const int threads = round_up(p.vecs, kMaxWarpSize);
  const int teams = threads < kMinBlockThreads ? kMinBlockThreads / threads : 1;
  p.blocks = device().multiprocessors * (kMaxRowThreads / (threads * teams)) / p.ranges;
  if (p.blocks < 1) p.blocks = 1;
  const Launch l = {dim3(unsigned(p.ranges * p.blocks)), dim3(threads, teams), stream, size_t(p.K) * sizeof(uint32_t)};
  return launch(quantize_batch_rows_kernel<Types>, l, p);
}

}  // namespace moe_fp8
