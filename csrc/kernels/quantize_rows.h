// The rows of quantize_rowwise, quantize_rowcol and quantize_weight, and those of permute_pad_quantize, as they lie or
// taken by index.
#pragma once
#include "kernels/dispatch.h"
#include "kernels/quantize_rowwise.h"
#include "primitives/row.h"

namespace moe_fp8 {
namespace {

// blockDim.x threads share a row, blockDim.y rows share a block. What counts is bytes in flight: few registers, many
// warps. On an H200, as a fraction of copy: K = 2048 with two vectors a thread 1.00, with four 0.98; K = 7168 the other
// way round, 0.95 and 1.00; K = 5120 1.00 with four.
constexpr int kMaxThreads = 1024;
constexpr int kThreadsOfShortRows = 128;  // a block of several short rows
constexpr int64_t kMaxBlocks = 1 << 21;   // of a launch; HIP has fewer than 2^32 threads

struct Tile { int vecs, threads; };
inline Tile tile_for(int64_t vecs) {
  const int held = vecs <= 64 ? 1 : vecs <= 512 ? 2 : 4;
  const int64_t threads = round_up<int64_t>(ceil_div<int64_t>(vecs, held), kLargestWarp);
  return {held, int(threads < 64 ? 64 : threads < kMaxThreads ? threads : kMaxThreads)};
}

constexpr int threads_bound(int vecs) { return vecs == 4 ? kMaxThreads : 512; }
constexpr int blocks_bound(int vecs, Row row) { return vecs == 4 || row == Row::kLong ? 1 : 4; }

// First element of a row; null: the row is zeros.
template <Rows kRows, class Bits>
MOE_DEVICE const Bits* find_row(const QuantizeRowwiseParams& p, int64_t row) {
  const Bits* x = static_cast<const Bits*>(p.x);
  if constexpr (kRows == Rows::kByIndex) {
    const int64_t source = p.index.row(row);
    return source < 0 ? nullptr : x + source * p.row_stride;
  }
  const int64_t outer = p.outer == 1 ? 0 : row / p.rows;
  return x + outer * p.outer_stride + (row - outer * p.rows) * p.row_stride;
}

template <Rows kRows, class In, Fp8Type kOut, int kVecs, Row kRow, bool kAligned>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kRow == Row::kLong ? kMaxThreads : threads_bound(kVecs), blocks_bound(kVecs, kRow))
    quantize_rowwise_kernel(MOE_GRID_CONSTANT const QuantizeRowwiseParams p) {
  __shared__ uint32_t of_wave[kMaxThreads / 32];
  const RowTeam team = {int(threadIdx.x), int(blockDim.x), of_wave + threadIdx.y * (blockDim.x / kWarpSize)};
  const int64_t row = p.first + int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool live = row < p.outer * p.rows;
  wait_for_previous_kernel();
  const auto* x = find_row<kRows, typename In::Bits>(p, kRows == Rows::kByIndex && !live ? 0 : row);
  const bool zero = kRows == Rows::kByIndex && x == nullptr;
  quantize_row<In, kOut, kVecs, kRow, kAligned>(team, x, p.K, live, zero, p.pow2_scale,
                                                static_cast<uint8_t*>(p.q) + row * p.K, p.scale + row);
}

// Beside another kernel, a row a block, in shared memory: its threads are few enough to fit in. A short row has fewer:
// rowcol of [98304, 1408] E = 8 at 0.73 of copy with 32, 0.65 with 64; [64, 1408, 2048] at 0.63 and 0.77.
constexpr int kThreadsBeside = 64, kBlocksBeside = 16;
constexpr int64_t kShortestBeside = 2048, kShortBeside = 4096;  // bytes of a row; the longest leave room for others

template <Rows kRows, class In, Fp8Type kOut>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreadsBeside, kBlocksBeside)
    quantize_rowwise_beside_kernel(MOE_GRID_CONSTANT const QuantizeRowwiseParams p) {
  MOE_DYNAMIC_SMEM(held);
  __shared__ uint32_t of_wave[kThreadsBeside / 32];
  const RowTeam team = {int(threadIdx.x), int(blockDim.x), of_wave};
  const int64_t row = blockIdx.x;
  const auto* x = find_row<kRows, typename In::Bits>(p, row);
  const bool zero = kRows == Rows::kByIndex && x == nullptr;
  quantize_staged_row<In, kOut>(team, x, p.K, zero, p.pow2_scale, reinterpret_cast<Vec16*>(held),
                                static_cast<uint8_t*>(p.q) + row * p.K, p.scale + row);
  if (blockIdx.x == gridDim.x - 1) wait_for_previous_kernel();
}

template <class In>
bool is_aligned(const QuantizeRowwiseParams& p) {
  constexpr int n = kVecElements<In>;
  return reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.K % n == 0 &&
         ((p.index.at == nullptr && p.outer * p.rows == 1) || (p.row_stride % n == 0 && p.outer_stride % n == 0));
}

inline bool can_run_beside(const QuantizeRowwiseParams& p) {
  return device().overlaps_kernels && dispatch(p.in, p.out, [&](auto in, auto) {
    const int64_t bytes = p.K * sizeof(typename decltype(in)::Bits);
    return is_aligned<decltype(in)>(p) && p.outer * p.rows <= kMaxBlocks && bytes >= kShortestBeside &&
           bytes <= device().shared_per_multiprocessor / 10;
  });
}

template <Rows kRows>
int launch_rows(const QuantizeRowwiseParams& p, void* stream) {
  const int64_t rows = p.outer * p.rows;
  if (rows == 0) return 0;
  return dispatch(p.in, p.out, [&](auto in, auto out) {
    using In = decltype(in);
    constexpr Fp8Type kOut = decltype(out)::value;
    if (p.beside) {
      const size_t bytes = p.K * sizeof(typename In::Bits);
      const int threads = bytes < kShortBeside ? kLargestWarp : kThreadsBeside;
      const Launch l = {dim3(unsigned(rows)), dim3(threads), stream, bytes};
      return launch(quantize_rowwise_beside_kernel<kRows, In, kOut>, l, p);
    }
    const int64_t vecs = ceil_div<int64_t>(p.K, kVecElements<In>);
    const Tile tile = tile_for(vecs);
    const int rows_per_block = tile.threads < kThreadsOfShortRows ? kThreadsOfShortRows / tile.threads : 1;
    const dim3 block(tile.threads, rows_per_block);
    auto run = [&](auto kernel) {
      QuantizeRowwiseParams part = p;
      for (; part.first < rows; part.first += kMaxBlocks * rows_per_block) {
        const int64_t blocks = ceil_div<int64_t>(rows - part.first, rows_per_block);
        const dim3 grid(unsigned(blocks < kMaxBlocks ? blocks : kMaxBlocks));
        if (const int e = launch(kernel, {grid, block, stream}, part)) return e;
      }
      return 0;
    };
    if (!is_aligned<In>(p)) return run(quantize_rowwise_kernel<kRows, In, kOut, 1, Row::kLong, false>);
    if (vecs > tile.vecs * tile.threads) return run(quantize_rowwise_kernel<kRows, In, kOut, 4, Row::kLong, true>);
    if (tile.vecs == 1) return run(quantize_rowwise_kernel<kRows, In, kOut, 1, Row::kFits, true>);
    if (tile.vecs == 2) return run(quantize_rowwise_kernel<kRows, In, kOut, 2, Row::kFits, true>);
    return run(quantize_rowwise_kernel<kRows, In, kOut, 4, Row::kFits, true>);
  });
}

}  // namespace
}  // namespace moe_fp8
