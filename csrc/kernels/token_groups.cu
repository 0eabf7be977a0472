#include "kernels/token_groups.h"

#include "primitives/group_table.h"

namespace moe_fp8 {
namespace {

// blockDim.x threads share a row, blockDim.y rows share a block; blocks stay, so that each builds the table of groups
// once.
constexpr int kThreads = 256, kBlocks = 6, kVecs = 4;  // of a thread, on their way at a time

// The directions: how many rows there are to write, and which row each comes from, -1 for zeros.
struct Pad {
  static MOE_HD int64_t rows(const CopyTokenGroupsParams& p) { return p.P; }
  static MOE_DEVICE int64_t source(const CopyTokenGroupsParams& p, const GroupTable& table, int row) {
    const int e = table.find(table.pos, int(p.E), row);
    const int i = row - table.pos[e];
    return e >= 0 && e < p.E && i < table.rows(e) ? table.row[e] + int64_t(i) : -1;
  }
};
struct Unpad {
  static MOE_HD int64_t rows(const CopyTokenGroupsParams& p) { return p.M; }
  static MOE_DEVICE int64_t source(const CopyTokenGroupsParams& p, const GroupTable& table, int row) {
    const int e = table.find(table.row, int(p.E), row);
    if (e >= p.E) return -1;
    const int64_t at = int64_t(p.starts[e]) + row - table.row[e];
    return at >= 0 && at < p.P ? at : -1;
  }
};

MOE_DEVICE void place_groups(const GroupTable& table, const CopyTokenGroupsParams& p) {
  build_group_table(table, p.offs, int(p.E), int(p.M), int(p.P), p.align);
  if (p.starts == nullptr) {
    if (blockIdx.x > 0) return;
    for (int e = threadIdx.y * blockDim.x + threadIdx.x; e < p.E; e += kThreads) {
      p.padded_starts[e] = table.pos[e];
      p.padded_offs[e] = table.pos[e + 1];
    }
    return;
  }
  for (int e = threadIdx.y * blockDim.x + threadIdx.x; e <= p.E; e += kThreads)
    table.pos[e] = e < p.E ? clamp_offset(p.starts[e], int(p.P)) : int(p.P);
  __syncthreads();
  block_scan<Scan::kMax>(table.pos, int(p.E));
}

template <class Direction, class Vec>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, kBlocks)
    copy_token_groups_kernel(MOE_GRID_CONSTANT const CopyTokenGroupsParams p) {
  MOE_DYNAMIC_SMEM(smem);
  wait_for_previous_kernel();
  const GroupTable table(reinterpret_cast<int*>(smem), int(p.E));
  place_groups(table, p);
  const int64_t vecs = p.row_bytes / int64_t(sizeof(Vec));
  const int step = blockDim.x;
  const int64_t rows = Direction::rows(p);
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < rows; row += gridDim.x * blockDim.y) {
    const int64_t source = Direction::source(p, table, int(row));
    const Vec* from = reinterpret_cast<const Vec*>(static_cast<const char*>(p.from) + source * p.from_stride);
    Vec* to = reinterpret_cast<Vec*>(static_cast<char*>(p.to) + row * p.row_bytes);
    for (int64_t first = threadIdx.x; first < vecs; first += kVecs * step) {
      Vec held[kVecs];
#pragma unroll
      for (int i = 0; i < kVecs; ++i)
        held[i] = source >= 0 && first + i * step < vecs ? load_stream(from + first + i * step) : Vec{};
#pragma unroll
      for (int i = 0; i < kVecs; ++i)
        if (first + i * step < vecs) store_stream(to + first + i * step, held[i]);
    }
  }
}

template <class Direction, class Vec>
int launch_with(const CopyTokenGroupsParams& p, void* stream) {
  const int64_t vecs = p.row_bytes / int64_t(sizeof(Vec)), rows = Direction::rows(p);
  int threads = kLargestWarp;
  while (threads < kThreads && threads * kVecs < vecs) threads *= 2;
  const int rows_per_block = kThreads / threads;
  const int64_t most = int64_t(kBlocks) * device().multiprocessors;
  int64_t blocks = ceil_div<int64_t>(rows, rows_per_block);
  if (blocks > most) blocks = most;
  if (blocks == 0) blocks = 1;  // padded_offs are wanted all the same
  Launch l = {dim3(unsigned(blocks)), dim3(threads, rows_per_block), stream};
  l.shared = 4 * GroupTable::words(int(p.E));
  return launch(copy_token_groups_kernel<Direction, Vec>, l, p);
}

// The widest vector that rows, their distances and both pointers are multiples of.
template <class Direction>
int copy(const CopyTokenGroupsParams& p, void* stream) {
  const uint64_t all = reinterpret_cast<uintptr_t>(p.from) | reinterpret_cast<uintptr_t>(p.to) |
                       uint64_t(p.row_bytes) | uint64_t(p.from_stride);
  if (all % 16 == 0) return launch_with<Direction, Vec16>(p, stream);
  if (all % 4 == 0) return launch_with<Direction, uint32_t>(p, stream);
  if (all % 2 == 0) return launch_with<Direction, uint16_t>(p, stream);
  return launch_with<Direction, uint8_t>(p, stream);
}

}  // namespace

int pad_token_groups(const CopyTokenGroupsParams& p, void* stream) { return copy<Pad>(p, stream); }
int unpad_token_groups(const CopyTokenGroupsParams& p, void* stream) { return copy<Unpad>(p, stream); }

}  // namespace moe_fp8
