// transpose_weight: bytes q [E, N, K] -> q_t [E, K, N], contiguous.
//
//   q_t[e, k, n] = q[e, n, k]
//
// expert_stride and row_stride of q are in bytes, and its last stride is 1. Any size and alignment is allowed. Weights
// that are quantized in square blocks have the same bytes in both directions, so this makes the operand of a product
// over N from the operand of a product over K.
#pragma once
#include <cstdint>

namespace moe_fp8 {

struct TransposeWeightParams {
  const uint8_t* q;
  uint8_t* q_t;
  int64_t E, N, K;
  int64_t expert_stride, row_stride;
};

int transpose_weight(const TransposeWeightParams& p, void* stream);
void transpose_weight_cpu(const TransposeWeightParams& p);

}  // namespace moe_fp8
