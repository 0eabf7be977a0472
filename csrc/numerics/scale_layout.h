// The blocked layout in which Blackwell's tensor cores read one-byte scales. A block (128x4 atom) of 128 rows by 4
// columns is 512 contiguous bytes. A matrix is padded to whole blocks, which follow one another along its rows. The
// scale of (row, column) is this byte of its block:
//
//   16 (row % 32) + 4 (row / 32 % 4) + column % 4
//
// So every 16 bytes are the four columns of the rows r, r + 32, r + 64 and r + 96. Source: NVIDIA cuBLAS, "1D block
// scaling factors layout".
#pragma once
#include "numerics/groups.h"

namespace moe_fp8 {

constexpr int kMxBlock = 32;  // elements of a scaling block of the MX formats
constexpr int kScaleRows = 128, kScaleColumns = 4, kScaleBytes = kScaleRows * kScaleColumns;  // one 128x4 atom

MOE_HD constexpr int64_t padded_scale_rows(int64_t rows) { return round_up<int64_t>(rows, kScaleRows); }
MOE_HD constexpr int64_t padded_scale_columns(int64_t columns) { return round_up<int64_t>(columns, kScaleColumns); }

// The offset of a scale in a matrix of `padded_columns` columns.
MOE_HD constexpr int64_t blocked_offset(int64_t row, int64_t column, int64_t padded_columns) {
  const int64_t block = row / kScaleRows * (padded_columns / kScaleColumns) + column / kScaleColumns;
  return block * kScaleBytes + row % 32 * 16 + row / 32 % 4 * 4 + column % 4;
}

// The groups that no scaling block crosses: groups of rows (M-groups) or of columns (K-groups).
enum class Groups : int { kNone, kRows, kColumns };

// Rows, or columns, of scales with groups, for any group sizes. Each group is a blocked matrix, and these follow one
// another. M-groups begin at multiples of 128 rows, K-groups at multiples of 4 columns.
MOE_HD constexpr int64_t grouped_scale_rows(int64_t rows, int64_t experts) { return rows + experts * kScaleRows; }
MOE_HD constexpr int64_t grouped_scale_columns(int64_t columns, int64_t experts) {
  return columns + experts * kScaleColumns;
}

}  // namespace moe_fp8
