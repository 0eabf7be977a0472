// Copies rows in whole 16-byte vectors, segment by segment.
//
// Rows that go to several places are cut into segments of kSegmentBytes. All rows of one segment are copied before the
// next segment, so that the L2 still holds them when they are read again.
#pragma once
#include "platform/launch.h"
#include "platform/waves.h"
#include "tokens/message_columns.h"

namespace moe_fp8 {

constexpr int64_t kMaxSegments = kMaxGridBlocksY - kMaxColumns;  // the segments of columns are along y of a grid
struct CopySegmentsPlan : CopyRowsParams {
  int64_t segment;  // bytes
};
inline int64_t segment_bytes(const RowIndex& source, int64_t row_bytes) {
  return source.repeats() && ceil_div(row_bytes, kSegmentBytes) <= kMaxSegments ? kSegmentBytes : row_bytes;
}

// Copies segment number `segment` of all rows. Called by blocks 0 to `blocks` - 1. blockDim.x threads share a row, and
// a block has blockDim.y rows at once. docs/kernels/tokens.md has other ways that were measured.
MOE_DEVICE void copy_segment(const CopySegmentsPlan& p, int segment, uint32_t block, uint32_t blocks) {
  const int64_t skipped = segment * p.segment, left = p.row_bytes - skipped;
  const int64_t vecs = (left < p.segment ? left : p.segment) / int64_t(sizeof(Vec16));
  const int step = blockDim.x;
#pragma unroll 1
  for (int64_t row = int64_t(block) * blockDim.y + threadIdx.y; row < p.rows; row += blocks * blockDim.y) {
    const int64_t source = p.source.row(row);
    const char* from_row = static_cast<const char*>(p.from) + source * p.from_stride + skipped;
    const Vec16* from = reinterpret_cast<const Vec16*>(from_row);
    Vec16* to = reinterpret_cast<Vec16*>(static_cast<char*>(p.to) + row * p.row_bytes + skipped);
#pragma unroll 1
    for (int64_t first = threadIdx.x; first < vecs; first += kUnitsInFlight * step) {
      Vec16 loaded[kUnitsInFlight];
#pragma unroll
      for (int i = 0; i < kUnitsInFlight; ++i)
        loaded[i] =
            source >= 0 && first + i * step < vecs ? load_stream<Reuse::kSoon>(from + first + i * step) : Vec16{};
#pragma unroll
      for (int i = 0; i < kUnitsInFlight; ++i)
        if (first + i * step < vecs) store_stream(to + first + i * step, loaded[i]);
    }
  }
}

// A grid of blocks of rows by `segments`, for threads that copy units of `unit` bytes, at most max_threads a row.
inline Launch segment_launch(int64_t rows, int64_t row_bytes, int64_t segment, int64_t segments, int unit,
                             void* stream, int max_threads = kMaxSegmentThreads) {
  const int64_t bytes = segment < row_bytes ? segment : row_bytes;
  const int64_t wanted = ceil_div<int64_t>(bytes / unit, kUnitsInFlight);
  int threads = 1;  // short rows, such as a token's scale or score, share waves
  while (threads < wanted && threads < kMaxWarpSize) threads *= 2;
  if (wanted > kMaxWarpSize)
    threads = int(round_up<int64_t>(wanted < max_threads ? wanted : max_threads, kMaxWarpSize));
  const int rows_per_block = threads < kShortRowThreads ? kShortRowThreads / threads : 1;
  const int64_t blocks = ceil_div<int64_t>(rows, rows_per_block);
  const dim3 grid(grid_blocks(blocks, threads * rows_per_block), unsigned(segments));
  return {grid, dim3(threads, rows_per_block), stream};
}

// The lowest bit set here is the largest power of two that divides both pointers, the row and the stride.
inline uint64_t alignment_bits(const CopyRowsParams& p) {
  return reinterpret_cast<uintptr_t>(p.from) | reinterpret_cast<uintptr_t>(p.to) | uint64_t(p.row_bytes) |
         uint64_t(p.from_stride);
}

}  // namespace moe_fp8
