// Rows on their way, whole vectors at a time.
//
// Where a row goes to several places, all rows of one piece are copied before the next, so that the L2 holds what is
// read at about the same time. On an H200, [32768, 4096] bytes to 8 places each in 381 us, in pieces of 512 bytes 450,
// whole 517.
#pragma once
#include "platform/launch.h"
#include "platform/waves.h"
#include "tokens/columns.h"

namespace moe_fp8 {

constexpr int64_t kPiece = 256, kMaxPieces = 65535 - kMaxColumns;
struct PiecesPlan : CopyRowsParams {
  int64_t piece;  // bytes
};
inline int64_t piece_of(const RowIndex& source, int64_t row_bytes) {
  return source.repeats() && ceil_div(row_bytes, kPiece) <= kMaxPieces ? kPiece : row_bytes;
}

// By one of so many blocks, of which blockDim.x threads share a row, and blockDim.y rows share a block. On an H200, of
// copy at [131072, 7168] and [16640, 5120]: two vectors a thread 0.99 and 0.97, four 0.98 and 0.95, one 0.88 and 0.92;
// blocks that stay and take row after row 0.91 and 0.88; rows through shared memory by bulk copies 0.94 and 0.93.
MOE_DEVICE void copy_piece(const PiecesPlan& p, int piece, uint32_t block, uint32_t blocks) {
  const int64_t skipped = piece * p.piece, left = p.row_bytes - skipped;
  const int64_t vecs = (left < p.piece ? left : p.piece) / int64_t(sizeof(Vec16));
  const int step = blockDim.x;
#pragma unroll 1
  for (int64_t row = int64_t(block) * blockDim.y + threadIdx.y; row < p.rows; row += blocks * blockDim.y) {
    const int64_t source = p.source.row(row);
    const char* from_row = static_cast<const char*>(p.from) + source * p.from_stride + skipped;
    const Vec16* from = reinterpret_cast<const Vec16*>(from_row);
    Vec16* to = reinterpret_cast<Vec16*>(static_cast<char*>(p.to) + row * p.row_bytes + skipped);
#pragma unroll 1
    for (int64_t first = threadIdx.x; first < vecs; first += kUnitsHeld * step) {
      Vec16 held[kUnitsHeld];
#pragma unroll
      for (int i = 0; i < kUnitsHeld; ++i)
        held[i] = source >= 0 && first + i * step < vecs ? load_stream<Reuse::kSoon>(from + first + i * step) : Vec16{};
#pragma unroll
      for (int i = 0; i < kUnitsHeld; ++i)
        if (first + i * step < vecs) store_stream(to + first + i * step, held[i]);
    }
  }
}

constexpr int kThreadsOfShortPieces = 256, kMostThreadsOfPieces = 1024;
constexpr int64_t kMostBlocksOfPieces = 1 << 21;  // HIP has fewer than 2^32 threads a launch

// Blocks of rows by `pieces`, of threads that move units of this size, at most so many.
inline Launch launch_of(int64_t rows, int64_t row_bytes, int64_t piece, int64_t pieces, int unit, void* stream,
                        int most = kMostThreadsOfPieces) {
  const int64_t held = piece < row_bytes ? piece : row_bytes;
  const int64_t wanted = ceil_div<int64_t>(held / unit, kUnitsHeld);
  int threads = 1;  // rows that are short, such as a token's scale or score, share waves
  while (threads < wanted && threads < kLargestWarp) threads *= 2;
  if (wanted > kLargestWarp) threads = int(round_up<int64_t>(wanted < most ? wanted : most, kLargestWarp));
  const int rows_per_block = threads < kThreadsOfShortPieces ? kThreadsOfShortPieces / threads : 1;
  const int64_t blocks = ceil_div<int64_t>(rows, rows_per_block);
  const dim3 grid(unsigned(blocks < kMostBlocksOfPieces ? blocks : kMostBlocksOfPieces), unsigned(pieces));
  return {grid, dim3(threads, rows_per_block), stream};
}

// Whose lowest one says what rows, their distances and both pointers are multiples of.
inline uint64_t bits_of(const CopyRowsParams& p) {
  return reinterpret_cast<uintptr_t>(p.from) | reinterpret_cast<uintptr_t>(p.to) | uint64_t(p.row_bytes) |
         uint64_t(p.from_stride);
}

}  // namespace moe_fp8
