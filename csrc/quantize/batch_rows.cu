// Rows of x and the amax of its columns from one read. Blocks walk rows, a thread a vector of each.
#include "platform/launch.h"
#include "primitives/groups.h"
#include "quantize/batch_columns_plan.h"
#include "quantize/row.h"

namespace moe_fp8 {
namespace {

using Types = TypesOf<BF16>;
constexpr int kRows = kWarpSize == 32 ? 4 : 2;  // at once, as registers are for
constexpr int kShare = kWarpSize / kRows;  // lanes of a wave that end up with what is of one
constexpr int kMostThreads = kLongestBatchRow / Types::kVec;  // that share a row; a multiprocessor holds so many
constexpr int kUsualThreads = 256;  // of a block of several teams

struct BatchRowsPlan : ColumnsPlan {
  int blocks;  // of a share of the rows
  int vecs;    // of a row
};

// The word of a pair, zero where it is not finite.
template <class In>
MOE_DEVICE uint32_t finite_word(uint32_t word) {
  static_assert(kPerWord<In> == 2);
  const auto kept = [&](int i, uint32_t half) { return magnitude_bits<In>(word, i) < F32::kInfinity ? half : 0; };
  return word & (kept(0, 0xffffu) | kept(1, 0xffff0000u));
}

// What waves tell their team of rows, in turns: who is late may still read what was said before.
using OfWaves = uint32_t[2][kRows][kMostThreads / 32];

// Rows of a share that are a block's: some for each of its teams at once, and then those behind the other blocks'.
// Behind the share's last row it comes once more, and so does a row's last vector: the same maxima and the same bytes.
template <class T>
struct BatchWalk {
  using In = typename T::In;
  const BatchRowsPlan& p;
  int begin, end, step, v;
  uint32_t most[4] = {};  // of the thread's columns, magnitudes of a pair

  struct Held {
    Vec16 x[kRows];
    int taken[kRows];
  };

  MOE_DEVICE explicit BatchWalk(const BatchRowsPlan& p) : p(p) {
    const int rows = kRows * int(blockDim.y), share = int(blockIdx.x) / p.blocks, block = int(blockIdx.x) % p.blocks;
    const auto row_at = [&](int64_t row) { return int(row < p.x_rows ? row : p.x_rows); };
    begin = row_at(int64_t(share) * p.share + block * rows);
    end = row_at(int64_t(share + 1) * p.share);
    step = p.blocks * rows;
    v = Min{}(int(threadIdx.x), p.vecs - 1);
  }
  MOE_DEVICE int row(int at, int i) const { return Min{}(at + int(threadIdx.y) + i * int(blockDim.y), end - 1); }
  MOE_DEVICE Held load(int at) const {
    Held held;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      held.x[i] = load_vec<T>(p, find_element<T>(p, row(at, i) * p.row_stride), v);
      held.taken[i] = p.taken[row(at, i)];
    }
    return held;
  }
  MOE_DEVICE void raise(const Vec16& x, bool finite) {
#pragma unroll
    for (int w = 0; w < 4; ++w) most[w] = max_magnitude<In>(most[w], finite ? x.w[w] : finite_word<In>(x.w[w]));
  }
  MOE_DEVICE void walk(OfWaves& of_waves) {
    const int lane = threadIdx.x % kWarpSize, own = lane / kShare, of_share = lane % kShare;
    const int waves = blockDim.x / kWarpSize, team = threadIdx.y * waves;
    Held held = load(begin);
    for (int at = begin, turn = 0; at < end; at += step, turn ^= 1) {
      uint32_t* const told = of_waves[turn][own] + team;
      uint32_t amax = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        if (const uint32_t of_wave = warp_max(amax_bits<In>(max_vec<In>(held.x[i]))); i == own) amax = of_wave;
      if (of_share == 0) told[threadIdx.x / kWarpSize] = amax;
      const Held next = load(at + step);  // under way while the team agrees on scales, and casts
      if (waves > 1) __syncthreads();
      else wave_barrier();
      for (int w = of_share; w < waves; w += kShare) amax = Max{}(amax, told[w]);
#pragma unroll
      for (int mask = kShare / 2; mask > 0; mask /= 2) amax = Max{}(amax, shfl_xor(amax, mask));
      const auto s = T::template scale_of<ScaleF32>(p, amax);
      if (threadIdx.x < kWarpSize && of_share == 0)
        store_stream(static_cast<float*>(p.scale) + row(at, own), s.dequant());
      T::with_cast(p, [&](auto cast) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const float multiplier = as_float(shfl(as_bits(s.multiplier), i * kShare));
          store_cast<T>(p, p.q + row(at, i) * p.K, v, held.x[i], multiplier, cast);
          if (held.taken[i]) raise(held.x[i], multiplier == multiplier);
        }
      });
      held = next;
    }
  }
};

template <class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kMostThreads, 1) quantize_batch_rows_kernel(MOE_GRID_CONSTANT const BatchRowsPlan p) {
  MOE_DYNAMIC_SMEM(smem);
  auto* const most = reinterpret_cast<uint32_t*>(smem);  // [K]
  __shared__ OfWaves of_waves;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  for (int c = thread; c < p.K; c += threads) most[c] = 0;
  __syncthreads();
  wait_for_previous_kernel();
  BatchWalk<T> block(p);
  block.walk(of_waves);
#pragma unroll
  for (int i = 0; i < T::kVec; ++i)
    atomicMax(most + block.v * T::kVec + i, magnitude_bits<typename T::In>(block.most[i / 2], i % 2));
  __syncthreads();
  for (int c = thread; c < p.K; c += threads)
    if (most[c] > 0) atomicMax(p.amax + c, most[c]);
}

}  // namespace

int launch_batch_rows(const ColumnsPlan& columns, void* stream) {
  BatchRowsPlan p = {columns};
  p.vecs = int(p.K / Types::kVec);
  const int threads = round_up(p.vecs, kLargestWarp);
  const int teams = threads < kUsualThreads ? kUsualThreads / threads : 1;
  p.blocks = device().multiprocessors * (kMostThreads / (threads * teams)) / p.shares;
  if (p.blocks < 1) p.blocks = 1;
  const Launch l = {dim3(unsigned(p.shares * p.blocks)), dim3(threads, teams), stream, size_t(p.K) * sizeof(uint32_t)};
  return launch(quantize_batch_rows_kernel<Types>, l, p);
}

}  // namespace moe_fp8
