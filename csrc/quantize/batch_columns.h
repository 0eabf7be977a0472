// One scale per column of the whole batch. Work that the slots of a token share is done once per token: a kernel finds
// the amax of every column, one casts x to fp8 in place, and one moves bytes to the slots and transposes them.
#pragma once
#include "platform/launch.h"
#include "primitives/transpose.h"
#include "quantize/batch_columns_plan.h"
#include "quantize/sources.h"

namespace moe_fp8 {

// In the first two kernels a lane has 16 bytes of a row, and a row of threads takes every eighth row of the block's
// range of a panel of columns.
constexpr int kThreadRows = 8, kColumnThreads = kThreadRows * kLanes;

// Walks the rows of a range, at the lane's columns.
template <class T>
struct ColumnWalk {
  const BatchColumnsPlan& p;
  int range;
  int64_t column;
  int first, end;  // rows of x that this row of threads walks

  MOE_DEVICE explicit ColumnWalk(const BatchColumnsPlan& p) : p(p), range(int(blockIdx.x / p.panels)) {
    column = (int64_t(blockIdx.x % p.panels) * kLanes + threadIdx.x) * T::kVec;
    const int64_t begin = int64_t(range) * p.range_rows, rows = p.x_rows - begin;
    first = int(begin) + threadIdx.y;
    end = int(begin + (rows < 0 ? 0 : rows < p.range_rows ? rows : p.range_rows));
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

// Step 1. Finds the row of x of every position, and marks the rows that any position has. The marks were zero before.
constexpr int kSourceThreads = 256;
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kSourceThreads, 1) find_sources_kernel(MOE_GRID_CONSTANT const BatchColumnsPlan p) {
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
    const bool has_row = e < E && i < groups.rows(e);
    const int source = has_row ? int(source_row(p.index, groups.row[e] + i)) : -1;
    p.source[at] = source;
    if (source >= 0) p.is_used[source] = 1;
  }
}

// Step 2. Finds the maxima of the rows that are used. Blocks combine them in global memory, in any order.
template <class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kColumnThreads, kColumnBlocks)
    find_amax_kernel(MOE_GRID_CONSTANT const BatchColumnsPlan p) {
  __shared__ float thread_row_amax[kThreadRows][kLanes * T::kVec];
  wait_for_previous_kernel();
  const ColumnWalk<T> walk(p);
  float amax[T::kVec] = {};
#pragma unroll 4
  for (int r = walk.first; r < walk.end; r += kThreadRows) {
    const Vec16 v = walk.template load<Reuse::kSoon>(r);
    const bool is_used = p.is_used[r];  // loaded with the row: a branch on it would delay the row
#pragma unroll
    for (int i = 0; i < T::kVec; ++i) amax[i] = is_used ? max_finite(amax[i], walk.element_of(v, i)) : amax[i];
  }
#pragma unroll
  for (int i = 0; i < T::kVec; ++i) thread_row_amax[threadIdx.y][threadIdx.x * T::kVec + i] = amax[i];
  __syncthreads();
  const int64_t first = int64_t(blockIdx.x % p.panels) * kLanes * T::kVec;
  for (int c = threadIdx.y * kLanes + threadIdx.x; c < kLanes * T::kVec; c += kColumnThreads) {
    float column_amax = 0;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) column_amax = fmaxf(column_amax, thread_row_amax[i][c]);
    if (first + c < p.K && column_amax > 0)
      atomicMax(p.amax + first + c, as_bits(column_amax));  // bits of positive floats are ordered as the floats
  }
}

// Step 3. Casts x from the last row back: the L2 still has the rows that step 2 read last.
template <class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kColumnThreads, kColumnBlocks)
    quantize_batch_columns_kernel(MOE_GRID_CONSTANT const BatchColumnsPlan p) {
  wait_for_previous_kernel();
  const ColumnWalk<T> walk(p);
  if (walk.column >= p.stride) return;
  ScaleF32 scale[T::kVec] = {};
#pragma unroll
  for (int i = 0; i < T::kVec; ++i)
    if (walk.column + i < p.K) scale[i] = T::template scale_of<ScaleF32>(p, p.amax[walk.column + i]);
  for (int64_t e = walk.range * kThreadRows + int(threadIdx.y); e < p.E; e += int64_t(p.ranges) * kThreadRows) {
    float* stored = column_scales(p).at(walk.column, e);
#pragma unroll
    for (int i = 0; i < T::kVec; ++i)
      if (walk.column + i < p.K) store_stream(stored + i, scale[i].stored());
  }
  const int count = ceil_div(walk.end - walk.first, kThreadRows);
  T::with_cast(p, [&](auto cast) {
    const auto cast4 = [&](const Vec16& v, int i) {
      const auto scaled = [&](int c) {
        const float x = walk.element_of(v, c);
        return nan_unless_finite(x * scale[c].multiplier, x);
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
