// The operands of the blockwise recipe: a scale for every 128 elements along a row, along a column of a token group, or
// for every square of 128 by 128 of a weight. Blocks at an edge are short.
//
// quantize_1x128: x [M, K] -> q [M, K], scale [M, KB], KB = ceil(K / 128)
//   scale[r, b]          from max |x[r, 128 b + i]|,               q[r, k] = cast(x[r, k] * m[r, k / 128])
// quantize_128x1: tokens x [M, K] in groups -> q_t [K, P] (or, not transposed, [P, K]), scale_t [K, B], padded_offs [E]
//   scale_t[k, block(r)] from max over the rows of r's block,      q_t[k, pos(r)] = cast(x[r, k] * m_t[k, block(r)])
//   pos(r) = padded start of r's group + i, block(r) = first block of the group + i / 128, i = r - start of the group;
//   groups begin at multiples of `align` positions and with a block of their own. Every other byte of q_t and the
//   scales of blocks without rows are zero.
// quantize_128x128: w [E, N, K] -> q [E, N, K], q_t [E, K, N], scale [E, NB, KB], of both
//
// Scales of activations are column-major, scale_stride() elements a column; what lies between M and that is zero. All
// else is contiguous. Strides are in elements; the stride along K is 1. No alignment is asked of the input.
#pragma once
#include "numerics/formats.h"
#include "numerics/groups.h"

namespace moe_fp8 {

struct QuantizeBlockwiseParams {
  const void* x;
  const int* offs;                   // [E], of 128x1
  uint8_t* q;
  float* scale;
  uint8_t* q_t;
  float* scale_t;                    // of 128x1
  int* padded_offs;                  // [E], of 128x1
  int64_t E, rows, K;                // rows: M of the tokens, N of one expert
  int64_t row_stride, group_stride;  // group_stride: between experts
  int64_t positions;                 // P, or N
  int align;
  bool transpose;                    // 128x1: q_t [K, P], otherwise [P, K]
  InType in;
  Fp8Type out;
  bool pow2_scale;
  RowIndex index = {};               // permute_pad_quantize: row r of the tokens is row index.row(r) of x
};

// Each uses what it needs of the parameters. 0, or the runtime's error code.
int quantize_1x128(const QuantizeBlockwiseParams& p, void* stream);
int quantize_128x1(const QuantizeBlockwiseParams& p, void* stream);
int quantize_1x128_128x1(const QuantizeBlockwiseParams& p, void* stream);
int quantize_128x128(const QuantizeBlockwiseParams& p, void* stream);

}  // namespace moe_fp8
