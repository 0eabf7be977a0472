// One scale per row, for rows of tokens or of experts, in place or by index.
#pragma once
#include "platform/launch.h"
#include "quantize/geometries.h"
#include "quantize/policy.h"
#include "quantize/progress.h"
#include "quantize/row.h"

namespace moe_fp8 {

// blockDim.x threads share a row, blockDim.y rows share a block. Bytes in flight decide the speed: few registers, many
// warps.
constexpr int kMaxThreads = 1024;

struct RowShape { int vecs, threads; };  // vectors per thread, threads per row
inline RowShape shape_of_row(int64_t vecs) {
  if (vecs <= kShortRow) return {vecs <= kMaxWarpSize ? 1 : 2, kMaxWarpSize};
  const int per_thread = vecs <= kRowVecsOfTwo ? 2 : 4;
  const int64_t threads = round_up<int64_t>(ceil_div<int64_t>(vecs, per_thread), kMaxWarpSize);
  return {per_thread, int(threads < kMaxThreads ? threads : kMaxThreads)};
}

struct RowsPlan {
  QuantizeParams p;
  int64_t first;  // first row of the launch
};

// The first element of a row; null for a row of zeros.
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
  __shared__ uint32_t wave_amax[kMaxThreads / 32];
  const QuantizeParams& p = plan.p;
  const RowTeam team = {int(threadIdx.x), int(blockDim.x), wave_amax + threadIdx.y * (blockDim.x / kWarpSize)};
  const int64_t row = plan.first + int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool valid = row < rows_of(p);
  wait_for_previous_kernel();
  const auto* x = find_row<T>(p, valid ? row : 0);
  quantize_row<T, kVecs, kRow>(p, team, x, valid, x == nullptr, p.q + row * p.K, row_scales(p).at(row, 0));
}

// One row per block, staged in shared memory: its few threads and registers leave room for blocks of the column kernel.

struct OverlappedRowsPlan : QuantizeParams {
  ProgressThrottle throttle;
};

template <class T>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kOverlappedThreads, kOverlappedBlocks)
    quantize_overlapped_rows_kernel(MOE_GRID_CONSTANT const OverlappedRowsPlan p) {
  MOE_DYNAMIC_SMEM(staged);
  __shared__ uint32_t wave_amax[kOverlappedThreads / 32];
  const RowTeam team = {int(threadIdx.x), int(blockDim.x), wave_amax};
  const int64_t row = blockIdx.x;
  uint32_t columns_seen = 0;
  if (threadIdx.x == 0) {
    if (row % kRowsPerPost == 0) post_progress(p.throttle, PeerKernel::kRows, uint32_t(row));
    columns_seen = peer_progress(p.throttle, PeerKernel::kRows);
  }
  const auto* x = find_row<T>(p, row);
  quantize_staged_row<T>(p, team, x, x == nullptr, reinterpret_cast<Vec16*>(staged), p.q + row * p.K,
                         row_scales(p).at(row, 0));
  // A waiting block keeps its place on the multiprocessor, so that later rows start later.
  if (threadIdx.x == 0) wait_for_peer(p.throttle, PeerKernel::kRows, uint32_t(row), columns_seen);
  if (blockIdx.x == gridDim.x - 1) wait_for_previous_kernel();
}

template <class T>
int launch_overlapped_rows(const QuantizeParams& p, RowOverlap overlap, void* stream) {
  const int64_t bytes = row_bytes(p);
  const int threads = bytes < kShortOverlappedBytes ? kMaxWarpSize : kOverlappedThreads;
  const Launch l = {dim3(unsigned(rows_of(p))), dim3(threads), stream, size_t(bytes)};
  return launch(quantize_overlapped_rows_kernel<T>, l, OverlappedRowsPlan{p, throttle_of(p, overlap)});
}

template <class In>
int launch_rows(const QuantizeParams& p, RowOverlap overlap, void* stream) {
  const int64_t rows = rows_of(p);
  if (rows == 0) return 0;
  using T = TypesOf<In>;
  const int64_t vecs = ceil_div<int64_t>(p.K, T::kVec);
  const RowShape shape = shape_of_row(vecs);
  auto run = [&](auto kernel) {
    const int rows_each = shape.threads < kThreadsOfShortRows ? kThreadsOfShortRows / shape.threads : 1;
    const int threads = shape.threads * rows_each;
    for (RowsPlan plan = {p, 0}; plan.first < rows; plan.first += max_grid_blocks(threads) * rows_each) {
      const dim3 grid(grid_blocks(ceil_div<int64_t>(rows - plan.first, rows_each), threads));
      if (const int e = launch(kernel, {grid, dim3(shape.threads, rows_each), stream}, plan)) return e;
    }
    return 0;
  };
  if constexpr (!T::kVectorized) {
    return run(quantize_rows_kernel<T, 1, Row::kLong>);
  } else {
    if (overlap != RowOverlap::kNone) return launch_overlapped_rows<T>(p, overlap, stream);
    if (vecs > shape.vecs * shape.threads) return run(quantize_rows_kernel<T, 4, Row::kLong>);
    if constexpr (!std::is_same_v<In, F16>) {  // one kernel serves float16, which is rare
      if (shape.vecs == 1) return run(quantize_rows_kernel<T, 1, Row::kFits>);
      if (shape.vecs == 2) return run(quantize_rows_kernel<T, 2, Row::kFits>);
    }
    return run(quantize_rows_kernel<T, 4, Row::kFits>);
  }
}

}  // namespace moe_fp8
