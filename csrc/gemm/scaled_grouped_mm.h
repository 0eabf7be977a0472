// scaled_grouped_mm: the contract of every GEMM backend, and kernels that surround a native one. All operands are
// K-major FP8.
//
// M-grouped (2D x 3D):  a [M, K], b [E, N, K], out [M, N]. Rows of group e meet expert e; tail rows are zeros.
//   out[m, n]    = scale_a[m] * scale_b[e, n] * sum_k a[m, k] * b[e, n, k]
// K-grouped (2D x 2D):  a [M, K], b [N, K], out [E, M, N]. Group e owns the columns [offs[e-1], offs[e]).
//   out[e, m, n] = scale_a[e, m] * scale_b[e, n] * sum_{k in e} a[m, k] * b[n, k]
//
// With block scales along K, every factor is multiplied by the scale of its own block:
//   a[m, k] * scale_a(m, block(k)), b[e, n, k] * scale_b(e, n, block(k)); along K every group begins a new block
// Blocks have 128 elements with float32 scales (the blockwise recipe), or 32 with E8M0 scales (MXFP8). E8M0 scales are
// row-major or blocked. Each group is a separate blocked matrix: of rows of a and of experts of b if the product is
// M-grouped, of columns of both if it is K-grouped.
//
// An M-grouped product may take rows of a by index: row m is then row index.row(m) of a, with its scale, or zeros if
// the index is no row. M counts the indices.
//
// An M-grouped product may have a low-rank term, as an adapter of the weights adds it. out[m, n] is then the
// product plus
//   sum_r low_rank.a[m, r] * low_rank.b[e, n, r]
//
// A K-grouped product may accumulate: out[e] = RN(RN32(float32(out[e]) + product)), and empty groups leave their out as
// it is. Or its out may lie transposed: out[e, m, n] is then at (e * N + n) * M + m, with the same bytes.
//
// Sums are float32, except where FP8 instructions sum in fewer bits: all of K with fast row scales, 128
// products otherwise, and all of K by the scaled instructions of gfx950. Strides count elements (bytes); out is
// contiguous.
#pragma once
#include "numerics/floats.h"
#include "numerics/groups.h"
#include "numerics/operand_scales.h"

namespace moe_fp8 {

// Factors of the low-rank term, in bfloat16. Elements along r are adjacent; strides count elements.
struct LowRankTerm {
  const uint16_t* a = nullptr;  // [M, rank]; null: no term
  const uint16_t* b = nullptr;  // [E, N, rank]
  int64_t a_stride = 0, b_stride = 0, b_group_stride = 0;
  int rank = 0;
};

struct ScaledGroupedMmParams {
  const uint8_t* a;
  const uint8_t* b;
  OperandScales scale_a, scale_b;  // block_size 0: one scale per row, in K-grouped products per row and group
  const int* offs;  // [E]
  void* out;
  int64_t E, M, N, K;
  int64_t a_stride, b_stride, b_group_stride;
  bool k_grouped;
  bool accumulate;
  bool out_transposed;  // never with accumulate
  bool out_float32;     // else bfloat16
  Fp8Type a_type, b_type;
  RowIndex index;  // of rows of a; index.at is null if rows are in order
  LowRankTerm low_rank;
};

// The functions below surround a native GEMM that trusts its offsets and leaves tail rows unwritten. Each returns 0 or
// the runtime's error code.

// Writes safe_offs [E + 1]: offs clamped into [0, limit], made monotonic and rounded down to `multiple`, in case a
// caller promised that wrongly. The last element is the first tail row: the end of the groups before it is rounded.
int prepare_offs(const int* offs, int* safe_offs, int E, int limit, int multiple, void* stream);
// Zeros the rows [*first, rows) of out [rows, row_bytes / 4].
int zero_rows(void* out, const int* first, int64_t rows, int64_t row_bytes, void* stream);
// Adds the low-rank term of p to p.out, whose rows are in order, in float32 by rising r. The sum is rounded to the
// dtype of out. Offsets may hold anything.
int add_low_rank(const ScaledGroupedMmParams& p, void* stream);
// Zeros the groups of out [E, group_bytes / 4] that are empty along K, whatever their scales are.
int zero_empty_groups(void* out, const int* ends, int E, int64_t group_bytes, void* stream);
// Adds product [E, group_size] to out, except for groups that are empty along K. Both are float32 or bfloat16, begin at
// multiples of 16 bytes, and group_size is a multiple of 8.
int add_groups(void* out, bool out_float32, const void* product, bool product_float32, const int* ends, int E,
               int64_t group_size, void* stream);

}  // namespace moe_fp8
