// Rows [P, R] of slots, sorted by expert, and rows [T, E * R] of tokens, with R columns for each expert. offs [E] has
// the ends of the groups of slots.
//
// take_expert_columns:    out[p, r] = x[source.row(p), e * R + r], e the group of row p; 0 if p has no row or no group
// spread_expert_columns:  out[t, e * R + r] = sum over rising j, of the slots whose row inverse[t, j] is in group e, of
//                         RN32(scores[t, j] * y[inverse[t, j], r]), in float32 from 0, rounded once
//
// out is contiguous, as are inverse and scores [T, top_k]. Null scores are ones. A slot whose inverse is out of [0, P)
// is left out.
#pragma once
#include "numerics/floats.h"
#include "numerics/groups.h"

namespace moe_fp8 {

struct TakeExpertColumnsParams {
  const void* x;
  const int* offs;
  RowIndex source;
  void* out;
  int64_t P, E, row_bytes, x_stride;  // row_bytes: of R values; x_stride in bytes
};

struct SpreadExpertColumnsParams {
  const void* y;
  const int* offs;
  const int* inverse;
  const float* scores;
  void* out;
  int64_t T, top_k, P, E, R;
  int64_t y_stride;  // elements
  InType in;
};

// On the current GPU, where the result is 0 or the runtime's error code, and on the CPU.
int take_expert_columns(const TakeExpertColumnsParams& p, void* stream);
void take_expert_columns_cpu(const TakeExpertColumnsParams& p);
int spread_expert_columns(const SpreadExpertColumnsParams& p, void* stream);
void spread_expert_columns_cpu(const SpreadExpertColumnsParams& p);

}  // namespace moe_fp8
