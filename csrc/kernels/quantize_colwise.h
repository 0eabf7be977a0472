// quantize_colwise: tokens x [M, K] in groups -> q_t [K, P], scale_t [E, K], padded_offs [E]
//
//   scale_t[e, k]   from max over group e's rows of |x[r, k]|
//   q_t[k, pos(r)]  = cast(x[r, k] * m_t[e, k]),  pos(r) = padded start of r's group + r - start of the group
//   every other byte of q_t is zero
//
// Outputs are contiguous. Strides are in elements; the stride along K is 1. No alignment is asked of x.
#pragma once
#include "numerics/formats.h"

namespace moe_fp8 {

struct QuantizeColwiseParams {
  const void* x;
  const int* offs;  // [E]
  uint8_t* q_t;
  float* scale_t;
  int* padded_offs;
  int64_t E, M, K;
  int64_t row_stride;
  int64_t positions;  // P
  int align;
  InType in;
  Fp8Type out;
  bool pow2_scale;
};

// 0, or the runtime's error code.
int quantize_colwise(const QuantizeColwiseParams& p, void* stream);

}  // namespace moe_fp8
