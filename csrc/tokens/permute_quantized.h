// Copies quantized rows by index, as copy_rows() does, together with their scales: row p of `to` [P, ...] gets the
// scales of row source.row(p) of `from` [rows, ...], or zeros if there is no such row.
//
// Scales move in words of four bytes: a float of a column-major matrix, or four neighbours of a blocked one. A blocked
// `to` lays rows out group by group if there are groups. All other bytes are zero: between columns, in the padding of
// blocks, and in the room that no group fills.
#pragma once
#include "numerics/scale_layout.h"
#include "tokens/copy_rows.h"

namespace moe_fp8 {

struct PermuteScalesParams {
  const void* from;
  void* to;  // at a multiple of 4 bytes
  RowIndex source;
  const int* offs;  // [E], ends of groups of the P rows; null: no groups
  int64_t E, P;
  int64_t words;                      // of a row, padding included
  bool blocked;
  int64_t row_stride, column_stride;  // words, of a column-major `from`

  // Rows of `to` in the order of its layout, padding included.
  MOE_HD int64_t lines() const {
    if (!blocked) return scale_stride(P);
    return padded_scale_rows(offs ? grouped_scale_rows(P, E) : P);
  }
  // Words of `to`. The last line may have no room for all of its words.
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

int permute_quantized(const CopyRowsParams& rows, const PermuteScalesParams& scales, void* stream);
void permute_quantized_cpu(const CopyRowsParams& rows, const PermuteScalesParams& scales);

}  // namespace moe_fp8
