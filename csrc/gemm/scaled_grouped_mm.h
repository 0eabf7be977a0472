// scaled_grouped_mm: what it computes, and what surrounds a native GEMM. All operands are K-major fp8.
//
// groups of rows (2D x 3D):     a [M, K], b [E, N, K], out [M, N]; rows of group e meet expert e, tail rows are zero
//   out[m, n]    = scale_a[m] * scale_b[e, n] * sum_k a[m, k] * b[e, n, k]
// groups of the sum (2D x 2D):  a [M, K], b [N, K], out [E, M, N]; group e owns the columns [offs[e-1], offs[e])
//   out[e, m, n] = scale_a[e, m] * scale_b[e, n] * sum_{k in e} a[m, k] * b[n, k]
//
// or, with scales of blocks along the sum, every factor times the scale of its own block:
//   a[m, k] * scale_a(m, block(k)), b[e, n, k] * scale_b(e, n, block(k)); blocks begin anew with every group of a sum
// of 128 elements, float32 (the blockwise recipe), or of 32, E8M0 (MXFP8): row-major, or in the blocked layout by
// groups of rows for a and by expert for b above, by groups of columns for both below.
//
// Rows of a may be taken by index in 2D x 3D: row m above is then row index.row(m) of a, with its scales, and a row of
// zeros where that is none. M is how many there are.
//
// A product of groups of the sum may be one that `adds`: out[e] = RN(RN32(float32(out[e]) + product)), and what a group
// that is empty has in out stays. Sums are float32, but for what instructions of fp8 add up by themselves, in fewer
// bits: all of a fast sum of rows, 128 products of others, of scaled ones on gfx950. Strides are in elements (bytes);
// out is contiguous.
#pragma once
#include "numerics/floats.h"
#include "numerics/groups.h"
#include "numerics/operand_scales.h"

namespace moe_fp8 {

struct ScaledGroupedMmParams {
  const uint8_t* a;
  const uint8_t* b;
  OperandScales scale_a, scale_b;  // block_size 0: one a row, of its group
  const int* offs;  // [E]
  void* out;
  int64_t E, M, N, K;
  int64_t a_stride, b_stride, b_group_stride;
  bool groups_of_sum;
  bool adds;
  bool out_float32;  // else bfloat16
  Fp8Type a_type, b_type;
  RowIndex index;  // of a; at null: rows as they lie
};

// Around a native GEMM that trusts its offsets and leaves tail rows unwritten; 0, or the runtime's error code.
// safe_offs [E + 1] receives offs clamped into [0, limit], made monotonic and rounded down to `multiple`, which a
// caller may have promised of them wrongly; behind them, their end before it was rounded: the first tail row.
int prepare_offs(const int* offs, int* safe_offs, int E, int limit, int multiple, void* stream);
// Zeros in the rows [*first, rows) of out [rows, row_bytes / 4].
int zero_rows(void* out, const int* first, int64_t rows, int64_t row_bytes, void* stream);
// Zeros in the groups of out [E, group_bytes / 4] that own nothing of the sum, whatever their scales were.
int zero_empty_groups(void* out, const int* ends, int E, int64_t group_bytes, void* stream);
// Adds product [E, group_size] to out, either of float32 or bfloat16 at a multiple of 16 bytes, group by group but for
// those that own nothing of the sum. Groups are of a multiple of 8 elements.
int add_groups(void* out, bool out_float32, const void* product, bool product_float32, const int* ends, int E,
               int64_t group_size, void* stream);

}  // namespace moe_fp8
