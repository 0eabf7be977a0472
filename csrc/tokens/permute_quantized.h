// Quantized rows that are taken by index, copied as copy_rows() does, and their scales beside them: row p of `to`
// [P, ...] has those of row source.row(p) of `from` [rows, ...], zeros where that is none.
//
// Scales move in words of four bytes: a float of a column-major matrix, or four neighbours of a blocked one, whose rows
// `to` has group by group where there are groups. All else is zero: what lies between columns or pads blocks, and the
// room of no group.
#pragma once
#include "numerics/scale_layout.h"
#include "tokens/copy_rows.h"

namespace moe_fp8 {

struct PermuteScalesParams {
  const void* from;
  void* to;  // at a multiple of 4 bytes
  RowIndex source;
  const int* offs;  // [E] ends of groups of the P rows; null: no groups
  int64_t E, P;
  int64_t words;                      // of a row, padding included
  bool blocked;
  int64_t row_stride, column_stride;  // of column-major ones, as `from` has them

  // Rows of `to` as its layout counts them, and its words: the last of those rows may have no room for all of theirs.
  MOE_HD int64_t lines() const {
    if (!blocked) return scale_stride(P);
    return padded_scale_rows(offs ? grouped_scale_rows(P, E) : P);
  }
  MOE_HD int64_t extent() const { return words * (offs ? grouped_scale_rows(P, E) : lines()); }
  MOE_HD int64_t word_of_from(int64_t row, int64_t word) const {
    return blocked ? blocked_word(row, word) : row * row_stride + word * column_stride;
  }
  MOE_HD int64_t word_of_to(int64_t line, int64_t word) const {
    return blocked ? blocked_word(line, word) : line + word * scale_stride(P);
  }

 private:
  MOE_HD int64_t blocked_word(int64_t row, int64_t word) const {
    return blocked_offset(row, word * kScaleColumns, words * kScaleColumns) / kScaleColumns;
  }
};

// 0, or the runtime's error code.
int permute_quantized(const CopyRowsParams& rows, const PermuteScalesParams& scales, void* stream);

}  // namespace moe_fp8
