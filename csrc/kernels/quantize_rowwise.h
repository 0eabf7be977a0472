// quantize_rowwise: x [outer, rows, K] -> q [outer * rows, K] (contiguous), scale [outer * rows]
//
//   amax[r]  = max_k |x[r, k]|
//   m[r]     = ScaleF32(amax[r]).multiplier,   scale[r] = 1 / m[r]
//   q[r, k]  = cast(x[r, k] * m[r])
//
// Strides are in elements; the stride along K is 1. No alignment is asked of x.
#pragma once
#include "numerics/formats.h"
#include "numerics/groups.h"

namespace moe_fp8 {

struct QuantizeRowwiseParams {
  const void* x;
  void* q;
  float* scale;
  int64_t outer, rows, K;
  int64_t outer_stride, row_stride;
  InType in;
  Fp8Type out;
  bool pow2_scale;
  int64_t first = 0;    // row, of those in q, that the launch begins with
  bool beside = false;  // x was there before the kernel ahead in the stream began: run beside that one, end after it
  RowIndex index = {};  // permute_pad_quantize: row r of q is row index.row(r) of x, zeros where that is none
};

// 0, or the runtime's error code.
int quantize_rowwise(const QuantizeRowwiseParams& p, void* stream);

}  // namespace moe_fp8
