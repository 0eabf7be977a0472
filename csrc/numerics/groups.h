// Token-group arithmetic. Offsets and indices are data on the device, so nothing here trusts them.
#pragma once
#include <cstdint>

#include "platform/compiler.h"

namespace moe_fp8 {

constexpr int kMaxExperts = 1024, kMaxAlign = 256;
constexpr int kBlock = 128;  // rows and columns of a tile; elements of a scaling block of the blockwise recipe

template <class T>
MOE_HD constexpr T round_up(T n, T multiple) { return (n + multiple - 1) / multiple * multiple; }
template <class T>
MOE_HD constexpr T ceil_div(T n, T d) { return (n + d - 1) / d; }

MOE_HD int clamp_offset(int offset, int rows) { return offset < 0 ? 0 : offset > rows ? rows : offset; }

// Rows of the padded layout: room for every group, rounded up to `align`, for any group sizes.
MOE_HD constexpr int64_t padded_extent(int64_t rows, int64_t experts, int64_t align) {
  return round_up(rows, align) + experts * align;
}

// Rows of the blockwise recipe's scales along the padded layout. Every group begins a new block.
MOE_HD constexpr int64_t block_extent(int64_t rows, int64_t experts, int64_t align) {
  return padded_extent(rows, experts, align < kBlock ? kBlock : align) / kBlock;
}
// The column stride, in elements, of the blockwise recipe's column-major scales of `rows` rows. Columns begin at
// 16-byte boundaries, which the tensor memory accelerator and cuBLASLt require.
MOE_HD constexpr int64_t scale_stride(int64_t rows) { return round_up<int64_t>(rows, 4); }

// Rows taken by index: i = at[p] stands for row i / top_k, or for a row of zeros if i is not in [0, rows * top_k).
struct RowIndex {
  const int* at = nullptr;
  uint32_t limit = 0;
  uint32_t multiplier = 0;  // i / top_k = i * multiplier >> shift, exact below 2^31
  int shift = 0;

  RowIndex() = default;
  RowIndex(const int* at, int64_t rows, int64_t top_k) : at(at), limit(uint32_t(rows * top_k)), shift(31) {
    while (int64_t(1) << (shift - 31) < top_k) ++shift;
    multiplier = uint32_t(ceil_div(uint64_t(1) << shift, uint64_t(top_k)));
  }
  bool repeats() const { return shift > 31; }  // whether several indices may stand for one row
  MOE_HD int slot(int64_t p) const {  // -1: no slot
    const uint32_t i = uint32_t(at[p]);
    return i < limit ? int(i) : -1;
  }
  MOE_HD int64_t row(int64_t p) const {  // -1: a row of zeros
    const uint32_t i = uint32_t(at[p]);
    return i < limit ? row_of(i) : -1;
  }
  MOE_HD int64_t row_of(uint32_t i) const { return int64_t(uint64_t(i) * multiplier >> shift); }  // i < limit
};
// The slot, and the row, of place p. Where there is no index, both are p itself.
MOE_HD int slot_of(const RowIndex& index, int64_t p) { return index.at ? index.slot(p) : int(p); }
MOE_HD int64_t source_row(const RowIndex& index, int64_t p) { return index.at ? index.row(p) : p; }

}  // namespace moe_fp8
