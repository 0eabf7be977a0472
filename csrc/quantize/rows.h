// Rows that have a scale each: of tokens or of experts, as they lie or taken by index.
#pragma once
#include "platform/launch.h"
#include "quantize/geometries.h"
#include "quantize/progress.h"
#include "quantize/row.h"

namespace moe_fp8 {

// blockDim.x threads share a row, blockDim.y rows share a block. What counts is bytes in flight: few registers, many
// warps. On an H200, as a fraction of copy: K = 2048 with two vectors a thread 1.00, with four 0.98; K = 7168 the other
// way round, 0.95 and 1.00; K = 5120 1.00 with four. Short rows by a wave each, which waits for no other: K = 256 0.83,
// K = 512 0.95, where teams of 64 threads gave 0.43 and 0.74.
constexpr int kMaxThreads = 1024;
constexpr int64_t kShortRow = 64;         // vectors, of a wave
constexpr int kThreadsOfShortRows = 128;  // a block of several short rows
constexpr int64_t kMaxRowsLaunch = 1 << 21;  // blocks; HIP has fewer than 2^32 threads

struct RowShape { int vecs, threads; };  // of a row: vectors a thread, threads
inline RowShape shape_of_row(int64_t vecs) {
  if (vecs <= kShortRow) return {vecs <= kLargestWarp ? 1 : 2, kLargestWarp};
  const int held = vecs <= 512 ? 2 : 4;
  const int64_t threads = round_up<int64_t>(ceil_div<int64_t>(vecs, held), kLargestWarp);
  return {held, int(threads < kMaxThreads ? threads : kMaxThreads)};
}

struct RowsPlan {
  QuantizeParams p;
  int64_t first;  // row that the launch begins with
};

// First element of a row; null: the row is zeros.
template <class T>
MOE_DEVICE const typename T::Bits* find_row(const QuantizeParams& p, int64_t row) {
  if (p.index.at) {
    const int64_t source = p.index.row(row);
    return source < 0 ? nullptr : find_element<T>(p, source * p.row_stride);
  }
  const int64_t e = p.weight && p.E > 1 ? row / p.rows : 0;
  return find_element<T>(p, e * p.group_stride + (row - e * p.rows) * p.row_stride);
}

constexpr int threads_bound(int vecs, Row row) { return vecs == 4 || row == Row::kLong ? kMaxThreads : 512; }
constexpr int blocks_bound(int vecs, Row row) { return vecs == 4 || row == Row::kLong ? 1 : 4; }

template <class T, int kVecs, Row kRow>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(threads_bound(kVecs, kRow), blocks_bound(kVecs, kRow))
    quantize_rows_kernel(MOE_GRID_CONSTANT const RowsPlan plan) {
  __shared__ uint32_t of_wave[kMaxThreads / 32];
  const QuantizeParams& p = plan.p;
  const RowTeam team = {int(threadIdx.x), int(blockDim.x), of_wave + threadIdx.y * (blockDim.x / kWarpSize)};
  const int64_t row = plan.first + int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool live = row < (p.weight ? p.E * p.rows : p.rows);
  wait_for_previous_kernel();
  const auto* x = find_row<T>(p, live ? row : 0);
  quantize_row<T, kVecs, kRow>(p, team, x, live, x == nullptr, p.q + row * p.K, static_cast<float*>(p.scale) + row);
}

// Beside another kernel, a row a block, in shared memory: its threads are few enough to fit in. A short row has fewer:
// both directions of [98304, 1408] E = 8 at 0.73 of copy with 32, 0.65 with 64; [64, 1408, 2048] at 0.63 and 0.77.
constexpr int kThreadsBeside = 64, kBlocksBeside = 16;
constexpr int64_t kShortestBeside = 2048, kShortBeside = 4096;  // bytes of a row; the longest leave room for others

// In step with the columns, where those work in clusters, each on a strip of a group that the L2 holds beside what is
// written, and x is so large that the two would drift apart. Both directions on an H200, in step and not: [128, 2048,
// 4096] 1265 and 1581 us, [128, 1536, 2048] 542 and 579, [128, 4096, 1024] 739 and 775, [262144, 2048] E = 128 697 and
// 790, of sizes as 1 / rank 899 and 970; [128, 2048, 768] 295, after the columns 325. But of larger groups [131072,
// 4096] E = 16 746 and 732, of small x [64, 1408, 2048] 254 and 251, [40, 1024, 1536] 90 and 84. The columns wait too:
// where rows alone did, [128, 2048, 4096] took 1347 us. One may be ahead by 1 MB: 2 MB 1272 us, 4 MB 1378, 8 MB 1424.
constexpr int64_t kShortestInStep = 1024, kLeastInStep = 1024;  // bytes of a row; rows of a group
constexpr int kGroupsOfL2 = 3, kDrift = 6;  // groups that the L2 holds; L2s of x
constexpr int kRowsTold = 32;               // at once

struct RowsBesidePlan : QuantizeParams {
  Pace pace;
};

template <class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreadsBeside, kBlocksBeside)
    quantize_rows_beside_kernel(MOE_GRID_CONSTANT const RowsBesidePlan p) {
  MOE_DYNAMIC_SMEM(held);
  __shared__ uint32_t of_wave[kThreadsBeside / 32];
  const RowTeam team = {int(threadIdx.x), int(blockDim.x), of_wave};
  const int64_t row = blockIdx.x;
  uint32_t columns_seen = 0;
  if (threadIdx.x == 0) {
    if (row % kRowsTold == 0) tell_pace(p.pace, Walker::kRows, uint32_t(row));
    columns_seen = other_pace(p.pace, Walker::kRows);
  }
  const auto* x = find_row<T>(p, row);
  quantize_staged_row<T>(p, team, x, x == nullptr, reinterpret_cast<Vec16*>(held), p.q + row * p.K,
                         static_cast<float*>(p.scale) + row);
  // In the place of the rows that would come next.
  if (threadIdx.x == 0) keep_pace(p.pace, Walker::kRows, uint32_t(row), columns_seen);
  if (blockIdx.x == gridDim.x - 1) wait_for_previous_kernel();
}

template <class T>
int launch_beside(const QuantizeParams& p, Beside beside, void* stream) {
  const int64_t bytes = row_bytes(p);
  const int threads = bytes < kShortBeside ? kLargestWarp : kThreadsBeside;
  const Launch l = {dim3(unsigned(rows_of(p))), dim3(threads), stream, size_t(bytes)};
  return launch(quantize_rows_beside_kernel<T>, l, RowsBesidePlan{p, pace_of(p, beside)});
}

template <class In>
int launch_rows(const QuantizeParams& p, Beside beside, void* stream) {
  const int64_t rows = rows_of(p);
  if (rows == 0) return 0;
  using T = TypesOf<In>;
  const int64_t vecs = ceil_div<int64_t>(p.K, T::kVec);
  const RowShape shape = shape_of_row(vecs);
  auto run = [&](auto kernel) {
    const int rows_each = shape.threads < kThreadsOfShortRows ? kThreadsOfShortRows / shape.threads : 1;
    for (RowsPlan plan = {p, 0}; plan.first < rows; plan.first += kMaxRowsLaunch * rows_each) {
      const int64_t blocks = ceil_div<int64_t>(rows - plan.first, rows_each);
      const dim3 grid(unsigned(blocks < kMaxRowsLaunch ? blocks : kMaxRowsLaunch));
      if (const int e = launch(kernel, {grid, dim3(shape.threads, rows_each), stream}, plan)) return e;
    }
    return 0;
  };
  if constexpr (!T::kVectorized) {
    return run(quantize_rows_kernel<T, 1, Row::kLong>);
  } else {
    if (beside != Beside::kNo) return launch_beside<T>(p, beside, stream);
    if (vecs > shape.vecs * shape.threads) return run(quantize_rows_kernel<T, 4, Row::kLong>);
    if constexpr (!std::is_same_v<In, F16>) {  // which is rare: one kernel serves it
      if (shape.vecs == 1) return run(quantize_rows_kernel<T, 1, Row::kFits>);
      if (shape.vecs == 2) return run(quantize_rows_kernel<T, 2, Row::kFits>);
    }
    return run(quantize_rows_kernel<T, 4, Row::kFits>);
  }
}

}  // namespace moe_fp8
