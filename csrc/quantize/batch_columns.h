// Columns that have one scale for the whole batch. What a token's slots share is done once a token: a pass finds every
// column's amax, one casts x to fp8 as it lies, and one moves bytes to the slots and transposes them.
#pragma once
#include "platform/launch.h"
#include "primitives/transpose.h"
#include "quantize/batch_columns_plan.h"
#include "quantize/sources.h"

namespace moe_fp8 {

// Of the first two: a lane has 16 bytes of a row, a row of threads every eighth row of a block's share of a panel of
// columns.
constexpr int kThreadRows = 8, kColumnThreads = kThreadRows * kLanes;
constexpr int kColumnBlocks = 4;  // of a multiprocessor

// The lane's columns of a share's rows.
template <class T>
struct ColumnWalk {
  const ColumnsPlan& p;
  int share;
  int64_t column;
  int first, end;  // of x, of the row of threads

  MOE_DEVICE explicit ColumnWalk(const ColumnsPlan& p) : p(p), share(int(blockIdx.x / p.panels)) {
    column = (int64_t(blockIdx.x % p.panels) * kLanes + threadIdx.x) * T::kVec;
    const int64_t begin = int64_t(share) * p.share, rows = p.x_rows - begin;
    first = int(begin) + threadIdx.y;
    end = int(begin + (rows < 0 ? 0 : rows < p.share ? rows : p.share));
  }
  template <Reuse kReuse>
  MOE_DEVICE Vec16 load(int row) const {
    if (column >= p.K) return Vec16{};
    return load_words<T, Vec16, kReuse>(p, find_element<T>(p, row * p.row_stride + column), p.K - column);
  }
  static MOE_DEVICE float element_of(const Vec16& v, int i) {
    constexpr int n = kPerWord<typename T::In>;
    return element<typename T::In>(v.w[i / n], i % n);
  }
};

// Step 1. Where positions come from, and which rows are taken; what was zeros before.
constexpr int kSourceThreads = 256, kSourceBlocks = 4;  // of a multiprocessor
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kSourceThreads, 1) find_sources_kernel(MOE_GRID_CONSTANT const ColumnsPlan p) {
  __shared__ int words[GroupTable::words(kMaxExperts)];
  const int E = int(p.E);
  const GroupTable groups(words, E);
  wait_for_previous_kernel();
  build_group_table(groups, p.offs, E, int(p.rows), int(p.positions), p.align);
  if (blockIdx.x == 0)
    for (int e = threadIdx.x; e < E; e += kSourceThreads) p.padded_offs[e] = groups.pos[e + 1];
  if (p.K == 0) return;
  const int64_t threads = int64_t(gridDim.x) * kSourceThreads;
  const int64_t thread = int64_t(blockIdx.x) * kSourceThreads + threadIdx.x;
  for (int64_t at = thread; at < p.positions; at += threads) {
    const int e = GroupTable::find(groups.pos, E, int(at)), i = int(at) - groups.pos[e];
    const bool there = e < E && i < groups.rows(e);
    const int source = there ? int(source_row(p, groups.row[e] + i)) : -1;
    p.source[at] = source;
    if (source >= 0) p.taken[source] = 1;
  }
}

// Step 2. Maxima of the rows that are taken come together in memory, in any order.
template <class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kColumnThreads, kColumnBlocks)
    find_amax_kernel(MOE_GRID_CONSTANT const ColumnsPlan p) {
  __shared__ float of_thread_row[kThreadRows][kLanes * T::kVec];
  wait_for_previous_kernel();
  const ColumnWalk<T> walk(p);
  float amax[T::kVec] = {};
#pragma unroll 4
  for (int r = walk.first; r < walk.end; r += kThreadRows) {
    const Vec16 v = walk.template load<Reuse::kSoon>(r);
    const bool taken = p.taken[r];  // not waited for before the load
#pragma unroll
    for (int i = 0; i < T::kVec; ++i) amax[i] = taken ? max_finite(amax[i], walk.element_of(v, i)) : amax[i];
  }
#pragma unroll
  for (int i = 0; i < T::kVec; ++i) of_thread_row[threadIdx.y][threadIdx.x * T::kVec + i] = amax[i];
  __syncthreads();
  const int64_t first = int64_t(blockIdx.x % p.panels) * kLanes * T::kVec;
  for (int c = threadIdx.y * kLanes + threadIdx.x; c < kLanes * T::kVec; c += kColumnThreads) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) most = fmaxf(most, of_thread_row[i][c]);
    if (first + c < p.K && most > 0) atomicMax(p.amax + first + c, as_bits(most));  // bits are as floats are ordered
  }
}

// Step 3. From the last row back: the L2 still has the last that the step before has read.
template <class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kColumnThreads, kColumnBlocks)
    quantize_columns_kernel(MOE_GRID_CONSTANT const ColumnsPlan p) {
  wait_for_previous_kernel();
  const ColumnWalk<T> walk(p);
  if (walk.column >= p.stride) return;
  ScaleF32 scale[T::kVec] = {};
#pragma unroll
  for (int i = 0; i < T::kVec; ++i)
    if (walk.column + i < p.K) scale[i] = T::template scale_of<ScaleF32>(p, p.amax[walk.column + i]);
  for (int64_t e = walk.share * kThreadRows + int(threadIdx.y); e < p.E; e += int64_t(p.shares) * kThreadRows) {
    float* stored = static_cast<float*>(p.scale_t) + e * p.K + walk.column;
#pragma unroll
    for (int i = 0; i < T::kVec; ++i)
      if (walk.column + i < p.K) store_stream(stored + i, scale[i].stored());
  }
  const int count = ceil_div(walk.end - walk.first, kThreadRows);
  T::with_cast(p, [&](auto cast) {
    const auto cast4 = [&](const Vec16& v, int i) {
      const auto scaled = [&](int c) {
        const float x = walk.element_of(v, c);
        return poisoned(x * scale[c].multiplier, x);
      };
      return cast(scaled(i), scaled(i + 1), scaled(i + 2), scaled(i + 3));
    };
#pragma unroll 4
    for (int i = count - 1; i >= 0; --i) {
      const int r = walk.first + i * kThreadRows;
      const Vec16 v = walk.template load<Reuse::kNone>(r);
      uint8_t* out = p.cast + r * p.stride + walk.column;
      if constexpr (T::kVec == 8) {
        *reinterpret_cast<Vec8*>(out) = Vec8{{cast4(v, 0), cast4(v, 4)}};
      } else {
        *reinterpret_cast<uint32_t*>(out) = cast4(v, 0);
      }
    }
  });
}

}  // namespace moe_fp8
