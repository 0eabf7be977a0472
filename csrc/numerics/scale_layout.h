// The blocked layout in which Blackwell's tensor cores read scales of one byte: 128 rows by 4 columns are 512
// neighbouring bytes, a matrix is padded to whole such blocks, blocks follow one another along a row.
//
//   byte 16 (row % 32) + 4 (row / 32 % 4) + column % 4 of its block
//
// so the 16 bytes of a line are the columns of the rows r, r + 32, r + 64 and r + 96. Source: NVIDIA cuBLAS, "1D block
// scaling factors layout".
#pragma once
#include "numerics/groups.h"

namespace moe_fp8 {

constexpr int kMxBlock = 32;  // elements of a scaling block of the MX formats
constexpr int kScaleRows = 128, kScaleColumns = 4, kScaleBytes = kScaleRows * kScaleColumns;  // of a block of scales

MOE_HD constexpr int64_t padded_scale_rows(int64_t rows) { return round_up<int64_t>(rows, kScaleRows); }
MOE_HD constexpr int64_t padded_scale_columns(int64_t columns) { return round_up<int64_t>(columns, kScaleColumns); }

// Of row `row` and column `column` of a matrix with so many columns, padding included.
MOE_HD constexpr int64_t blocked_offset(int64_t row, int64_t column, int64_t padded_columns) {
  const int64_t block = row / kScaleRows * (padded_columns / kScaleColumns) + column / kScaleColumns;
  return block * kScaleBytes + row % 32 * 16 + row / 32 % 4 * 4 + column % 4;
}

// Groups that a scaling block does not cross: of rows, or of columns, the summed dimension of a product.
enum class Groups : int { kNone, kRows, kColumns };

// Groups of rows (M-groups) or of columns (K-groups), each a blocked matrix of its own, one behind the other: room for
// any sizes. A group of rows begins at a multiple of 128 of them, one of columns at a multiple of 4.
MOE_HD constexpr int64_t grouped_scale_rows(int64_t rows, int64_t experts) { return rows + experts * kScaleRows; }
MOE_HD constexpr int64_t grouped_scale_columns(int64_t columns, int64_t experts) {
  return columns + experts * kScaleColumns;
}

}  // namespace moe_fp8
