// Tables of token groups in a block's shared memory, and the scans that build them.
#pragma once
#include "numerics/groups.h"
#include "platform/waves.h"
#include "primitives/functional.h"

namespace moe_fp8 {

// Group e has the rows [row[e], row[e+1]) of the input and the positions [pos[e], pos[e+1]) of the padded layout. Group
// E is the tail: rows of no group, and positions that hold only zeros.
struct GroupTable {
  static MOE_HD constexpr int words(int experts) { return 2 * (experts + 2); }
  MOE_DEVICE GroupTable(int* storage, int E) : row(storage), pos(storage + E + 2) {}

  int* row;
  int* pos;

  MOE_DEVICE int rows(int e) const { return row[e + 1] - row[e]; }

  // The group that holds `at`, if groups begin at first[0..E]: the last that begins at `at` or before it. -1: none.
  static MOE_DEVICE int find(const int* first, int E, int at) {
    int low = -1, high = E + 1;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first[middle] <= at) low = middle;
      else high = middle;
    }
    return low;
  }
};

constexpr int kLine = 128;  // positions in a line tile: one full cache line of fp8 bytes

// Line tiles that [begin, end) touches.
MOE_HD int line_tiles(int begin, int end) { return end > begin ? (end - 1) / kLine - begin / kLine + 1 : 0; }

// Inclusive scan of data[0..n), in place. Values are at least 0. Called by the whole block; ends with a barrier.
template <class Combine>
MOE_DEVICE void block_scan(int* data, int n, Combine combine) {
  __shared__ int wave_totals[32 + 1];
  const int threads = blockDim.x * blockDim.y, t = threadIdx.y * blockDim.x + threadIdx.x;
  const int lane = t % kWarpSize, wave = t / kWarpSize, waves = threads / kWarpSize;
  int carry = 0;
  for (int base = 0; base < n; base += threads) {
    int v = base + t < n ? data[base + t] : 0;
    for (int d = 1; d < kWarpSize; d <<= 1) {
      const int received = int(shfl_up(uint32_t(v), d));
      if (lane >= d) v = combine(v, received);
    }
    if (lane == kWarpSize - 1) wave_totals[wave] = v;
    __syncthreads();
    for (int w = 0; w < wave; ++w) v = combine(v, wave_totals[w]);
    v = combine(v, carry);
    for (int w = 0; w < waves; ++w) carry = combine(carry, wave_totals[w]);
    if (base + t < n) data[base + t] = v;
    __syncthreads();
  }
}

// Makes offs [E], which may hold anything, safe: ends[e] is offs[e] clamped into [0, limit], rounded down to `multiple`
// and not below ends[e - 1]. Called by the whole block with ends in shared memory; ends with a barrier.
MOE_DEVICE void clamp_and_scan_offs(int* ends, const int* offs, int E, int limit, int multiple) {
  const int threads = blockDim.x * blockDim.y, t = threadIdx.y * blockDim.x + threadIdx.x;
  for (int e = t; e < E; e += threads) ends[e] = clamp_offset(offs[e], limit) / multiple * multiple;
  __syncthreads();
  block_scan(ends, E, Max{});
}

// begins [E + 1]: the first row of each group, and the end of the last. Called by the whole block, which is
// one-dimensional; ends with a barrier.
MOE_DEVICE void find_begins(int* begins, const int* offs, int E, int rows) {
  if (threadIdx.x == 0) begins[0] = 0;
  clamp_and_scan_offs(begins + 1, offs, E, rows, 1);
}

// Fills the table. offs [E] may hold anything; group ends are rounded down to `multiple`. positions: the extent of the
// padded layout. Called by the whole block; ends with a barrier.
MOE_DEVICE void build_group_table(const GroupTable& table, const int* offs, int E, int rows, int positions, int align,
                                  int multiple = 1) {
  const int threads = blockDim.x * blockDim.y, t = threadIdx.y * blockDim.x + threadIdx.x;
  if (t == 0) table.row[0] = table.pos[0] = 0;
  clamp_and_scan_offs(table.row + 1, offs, E, rows, multiple);
  for (int e = t; e < E; e += threads) table.pos[e + 1] = round_up(table.row[e + 1] - table.row[e], align);
  __syncthreads();
  block_scan(table.pos + 1, E, Sum{});
  if (t == 0) {
    table.row[E + 1] = rows;
    table.pos[E + 1] = positions;
  }
  __syncthreads();
}

}  // namespace moe_fp8
