#include "tokens/copy_rows.h"

#include "platform/launch.h"
#include "platform/memory.h"
#include "platform/waves.h"
#include "tokens/columns.h"

namespace moe_fp8 {
namespace {

// blockDim.x threads share a row, blockDim.y rows share a block. On an H200, of copy at [131072, 7168] and [16640,
// 5120]: two vectors a thread 0.99 and 0.97, four 0.98 and 0.95, one 0.88 and 0.92; blocks that stay and take row after
// row 0.91 and 0.88; rows through shared memory by bulk copies 0.94 and 0.93.
constexpr int kThreadsOfShortRows = 256, kMaxThreads = 1024;
constexpr int64_t kMaxBlocks = 1 << 21;  // HIP has fewer than 2^32 threads a launch

// Where a row goes to several places, all rows of one piece, blockIdx.y, are copied before the next, so that the L2
// holds what is read at about the same time. On an H200, [32768, 4096] bytes to 8 places each in 381 us, in pieces of
// 512 bytes 450, whole 517.
constexpr int64_t kPiece = 256, kMaxPieces = 65535 - kMaxColumns;
struct PiecesPlan : CopyRowsParams {
  int64_t piece;  // bytes
};

MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kMaxThreads, 1) copy_rows_kernel(MOE_GRID_CONSTANT const PiecesPlan p) {
  wait_for_previous_kernel();
  const int64_t skipped = blockIdx.y * p.piece, left = p.row_bytes - skipped;
  const int64_t vecs = (left < p.piece ? left : p.piece) / int64_t(sizeof(Vec16));
  const int step = blockDim.x;
#pragma unroll 1
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < p.rows; row += gridDim.x * blockDim.y) {
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

// The same of several columns, and of units of any size: a block has a piece of one column.
struct PackTokensPlan : PackTokensParams {
  int64_t piece;  // bytes
  int pieces[kMaxColumns];
};

MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kMaxThreads, 1) pack_tokens_kernel(MOE_GRID_CONSTANT const PackTokensPlan p) {
  int column = 0, piece = blockIdx.y;
  while (piece >= p.pieces[column]) piece -= p.pieces[column++];
  const Column& c = p.columns[column];
  wait_for_previous_kernel();
  with_units(p, c, [&](auto load) {
    const int64_t of_piece = p.piece / int64_t(sizeof(typename decltype(load)::Type)), begin = piece * of_piece;
    const int64_t end = begin + of_piece < c.padded_units ? begin + of_piece : c.padded_units;
#pragma unroll 1
    for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < p.rows; row += gridDim.x * blockDim.y)
      copy_units(p, c, row, p.token(row), begin + threadIdx.x, end, blockDim.x, load);
  });
}

int64_t piece_of(const RowIndex& source, int64_t row_bytes) {
  return source.repeats() && ceil_div(row_bytes, kPiece) <= kMaxPieces ? kPiece : row_bytes;
}

// Blocks of rows by `pieces`, of threads that move units of this size.
Launch launch_of(int64_t rows, int64_t row_bytes, int64_t piece, int64_t pieces, int unit, void* stream) {
  const int64_t held = piece < row_bytes ? piece : row_bytes;
  const int64_t wanted = ceil_div<int64_t>(held / unit, kUnitsHeld);
  int threads = 1;  // rows that are short, such as a token's scale or score, share waves
  while (threads < wanted && threads < kLargestWarp) threads *= 2;
  if (wanted > kLargestWarp)
    threads = int(round_up<int64_t>(wanted < kMaxThreads ? wanted : kMaxThreads, kLargestWarp));
  const int rows_per_block = threads < kThreadsOfShortRows ? kThreadsOfShortRows / threads : 1;
  const int64_t blocks = ceil_div<int64_t>(rows, rows_per_block);
  const dim3 grid(unsigned(blocks < kMaxBlocks ? blocks : kMaxBlocks), unsigned(pieces));
  return {grid, dim3(threads, rows_per_block), stream};
}

}  // namespace

// By the widest unit that rows, their distances and both pointers are multiples of.
int copy_rows(const CopyRowsParams& p, void* stream) {
  if (p.rows == 0 || p.row_bytes == 0) return 0;
  const uint64_t all = reinterpret_cast<uintptr_t>(p.from) | reinterpret_cast<uintptr_t>(p.to) |
                       uint64_t(p.row_bytes) | uint64_t(p.from_stride);
  if (all % sizeof(Vec16) == 0) {
    const PiecesPlan plan = {p, piece_of(p.source, p.row_bytes)};
    const int64_t pieces = ceil_div(p.row_bytes, plan.piece);
    return launch(copy_rows_kernel, launch_of(p.rows, p.row_bytes, plan.piece, pieces, sizeof(Vec16), stream), plan);
  }
  const Unit unit = widest_unit(int64_t(all));
  const int64_t units = p.row_bytes / bytes_of(unit);
  PackTokensParams packed = {p.to, p.source, nullptr, p.rows, p.row_bytes};
  packed.columns[packed.num_columns++] = {p.from, p.from_stride, bytes_of(unit), 0, units, units, unit};
  return pack_tokens(packed, stream);
}

int pack_tokens(const PackTokensParams& p, void* stream) {
  if (p.rows == 0 || p.row_bytes == 0) return 0;
  PackTokensPlan plan = {p, piece_of(p.source, p.row_bytes)};
  int64_t pieces = 0;
  for (int i = 0; i < p.num_columns; ++i) {
    const Column& c = p.columns[i];
    plan.pieces[i] = int(ceil_div<int64_t>(c.padded_units * bytes_of(c.unit), plan.piece));
    pieces += plan.pieces[i];
  }
  const int unit = bytes_of(p.columns[0].unit);
  return launch(pack_tokens_kernel, launch_of(p.rows, p.row_bytes, plan.piece, pieces, unit, stream), plan);
}

}  // namespace moe_fp8
