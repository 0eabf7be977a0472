// The operands of the MXFP8 recipe: a scale of one E8M0 byte for every 32 elements along a row or along a column of a
// token group. Blocks at an edge are short.
//
// rows:    x [M, K] -> q [M, K], scale [M, KB], KB = ceil(K / 32)
//   scale[r, b]           from max |x[r, 32 b + i]|,              q[r, k] = cast(x[r, k] * m[r, k / 32])
// columns: tokens x [M, K] in groups -> q_t [K, P], scale_t [K, P / 32], padded_offs [E]
//   scale_t[k, p / 32]    from max over the rows r at positions p of a block,
//   q_t[k, pos(r)] = cast(x[r, k] * m_t[k, pos(r) / 32]),         pos(r) = padded start of r's group + r - its start
//   groups begin at multiples of `align` positions, 32, 64 or 128; every other byte of q_t and scale_t is zero.
// weights: w [E, N, K] -> q [E, N, K], scale; q_t [E, K, N], scale_t; of both directions of every expert
//
// Scales are row-major, or blocked (numerics/scale_layout.h): as one matrix, by groups of rows [M + 128 E, round_up(KB,
// 4)] (M-groups), by groups of columns [round_up(K, 128), P / 32 + 4 E] (K-groups), or by experts. All outputs are
// contiguous. Strides are in elements; the stride along K is 1. No alignment is asked of the input.
#pragma once
#include "numerics/formats.h"
#include "numerics/groups.h"

namespace moe_fp8 {

struct QuantizeMxParams {
  const void* x;
  const int* offs;                   // [E], of tokens in groups
  uint8_t* q;
  uint8_t* scale;
  uint8_t* q_t;
  uint8_t* scale_t;
  int* padded_offs;                  // [E]
  int* places;                       // [M], scratch of 1x32 by groups
  int64_t E, rows, K;                // rows: M of the tokens, N of one expert
  int64_t row_stride, group_stride;  // group_stride: between experts
  int64_t positions;                 // P, or N
  int align;
  bool blocked;
  bool by_groups;                    // 1x32: blocked scales, of every group
  bool floor;                        // scaling, otherwise rceil
  InType in;
  Fp8Type out;
  RowIndex index = {};               // permute_pad_quantize: row r of the tokens is row index.row(r) of x
};

// Each uses what it needs of the parameters.
// 0, or the runtime's error code.
int quantize_mx_1x32(const QuantizeMxParams& p, void* stream);
int quantize_mx_32x1(const QuantizeMxParams& p, void* stream);
int quantize_mx_1x32_32x1(const QuantizeMxParams& p, void* stream);
int quantize_mx_weight(const QuantizeMxParams& p, void* stream);

}  // namespace moe_fp8
