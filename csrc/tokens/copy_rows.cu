#include "tokens/copy_rows.h"

#include "platform/launch.h"
#include "platform/memory.h"
#include "platform/waves.h"

namespace moe_fp8 {
namespace {

// blockDim.x threads share a row, blockDim.y rows share a block. On an H200, of copy at [131072, 7168] and [16640,
// 5120]: two vectors a thread 0.99 and 0.97, four 0.98 and 0.95, one 0.88 and 0.92; blocks that stay and take row after
// row 0.91 and 0.88; rows through shared memory by bulk copies 0.94 and 0.93.
constexpr int kVecs = 2, kThreadsOfShortRows = 256, kMaxThreads = 1024;
constexpr int64_t kMaxBlocks = 1 << 21;  // HIP has fewer than 2^32 threads a launch

// Where a row goes to several places, all rows of one piece, blockIdx.y, are copied before the next, so that the L2
// holds what is read at about the same time. On an H200, [32768, 4096] bytes to 8 places each in 381 us, in pieces of
// 512 bytes 450, whole 517.
constexpr int64_t kPiece = 256, kMaxPieces = 65535;
struct PiecesPlan : CopyRowsParams {
  int64_t piece;  // bytes
};

template <class Vec>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kMaxThreads, 1) copy_rows_kernel(MOE_GRID_CONSTANT const PiecesPlan p) {
  wait_for_previous_kernel();
  const int64_t skipped = blockIdx.y * p.piece, left = p.row_bytes - skipped;
  const int64_t vecs = (left < p.piece ? left : p.piece) / int64_t(sizeof(Vec));
  const int step = blockDim.x;
#pragma unroll 1
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < p.rows; row += gridDim.x * blockDim.y) {
    const int64_t source = p.source.row(row);
    const Vec* from = reinterpret_cast<const Vec*>(static_cast<const char*>(p.from) + source * p.from_stride + skipped);
    Vec* to = reinterpret_cast<Vec*>(static_cast<char*>(p.to) + row * p.row_bytes + skipped);
#pragma unroll 1
    for (int64_t first = threadIdx.x; first < vecs; first += kVecs * step) {
      Vec held[kVecs];
#pragma unroll
      for (int i = 0; i < kVecs; ++i)
        held[i] = source >= 0 && first + i * step < vecs ? load_stream<Reuse::kSoon>(from + first + i * step) : Vec{};
#pragma unroll
      for (int i = 0; i < kVecs; ++i)
        if (first + i * step < vecs) store_stream(to + first + i * step, held[i]);
    }
  }
}

template <class Vec>
int launch_with(const CopyRowsParams& p, void* stream) {
  const int64_t of_row = ceil_div(p.row_bytes, kPiece);
  const bool whole = !p.source.repeats() || of_row > kMaxPieces;
  const PiecesPlan plan = {p, whole ? p.row_bytes : kPiece};
  const int64_t held = plan.piece < p.row_bytes ? plan.piece : p.row_bytes;
  const int64_t wanted = ceil_div<int64_t>(held / int64_t(sizeof(Vec)), kVecs);
  int threads = 1;  // rows that are short, such as a token's scale or score, share waves
  while (threads < wanted && threads < kLargestWarp) threads *= 2;
  if (wanted > kLargestWarp)
    threads = int(round_up<int64_t>(wanted < kMaxThreads ? wanted : kMaxThreads, kLargestWarp));
  const int rows_per_block = threads < kThreadsOfShortRows ? kThreadsOfShortRows / threads : 1;
  const int64_t blocks = ceil_div<int64_t>(p.rows, rows_per_block);
  const dim3 grid(unsigned(blocks < kMaxBlocks ? blocks : kMaxBlocks), whole ? 1 : unsigned(of_row));
  return launch(copy_rows_kernel<Vec>, {grid, dim3(threads, rows_per_block), stream}, plan);
}

}  // namespace

// By the widest vector that rows, their distances and both pointers are multiples of.
int copy_rows(const CopyRowsParams& p, void* stream) {
  if (p.rows == 0 || p.row_bytes == 0) return 0;
  const uint64_t all = reinterpret_cast<uintptr_t>(p.from) | reinterpret_cast<uintptr_t>(p.to) |
                       uint64_t(p.row_bytes) | uint64_t(p.from_stride);
  if (all % 16 == 0) return launch_with<Vec16>(p, stream);
  if (all % 4 == 0) return launch_with<uint32_t>(p, stream);
  return launch_with<uint8_t>(p, stream);
}

}  // namespace moe_fp8
