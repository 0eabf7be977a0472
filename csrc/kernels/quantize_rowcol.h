// Both directions of one tensor.
//
// quantize_rowcol: tokens x [M, K] in groups -> q [M, K], scale [M], q_t [K, P], scale_t [E, K], padded_offs [E]
//   rowwise      scale[r]      from max_k |x[r, k]|                      q[r, k]        = cast(x[r, k] * m[r])
//   columnwise   scale_t[e, k] from max over group e's rows of |x[r, k]|  q_t[k, pos(r)] = cast(x[r, k] * m_t[e, k])
//   pos(r) = padded start of r's group + r - start of the group; every other byte of q_t is zero.
//
// quantize_weight: experts w [E, N, K] -> q [E, N, K], scale [E, N], q_t [E, K, N], scale_t [E, K], the same with
//   groups of N rows, nothing padded.
//
// Outputs are contiguous. Strides are in elements; the stride along K is 1. No alignment is asked of the input.
#pragma once
#include "numerics/formats.h"
#include "numerics/groups.h"

namespace moe_fp8 {

struct QuantizeRowcolParams {
  const void* x;
  const int* offs;        // [E], unused for weights
  uint8_t* q;
  float* scale;
  uint8_t* q_t;
  float* scale_t;
  int* padded_offs;       // [E], null for weights
  int64_t E, rows, K;     // rows: M of the tokens, N of one expert
  int64_t row_stride, group_stride;  // group_stride: between experts, weights only
  int64_t positions;      // P, or N
  int align;
  InType in;
  Fp8Type out;
  bool pow2_scale;
  RowIndex index = {};    // permute_pad_quantize: row r of the tokens is row index.row(r) of x
};

// 0, or the runtime's error code.
int quantize_rowcol(const QuantizeRowcolParams& p, void* stream);
int quantize_weight(const QuantizeRowcolParams& p, void* stream);

}  // namespace moe_fp8
