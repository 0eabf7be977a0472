// Products of tokens with factors of a low rank R, in bfloat16, by group. Row p of the sorted rows is in group e if
// offs[e-1] <= p < offs[e], and its token is x[source.row(p)], or x[p] if there are no indices.
//
// narrow_tokens:  out[p, r] = sum over w of x[token(p), w] * m[e, r, w]; 0 if p has no token or no group
// outer_tokens:   out[e, r, w] = sum over the rows p of group e of RN16(scores[slot(p)] * u[p, r]) * x[token(p), w]
//
// Sums are in float32, in an order that depends on sizes and groups alone, and are rounded once to the dtype of out.
// out is contiguous, as is scores. Rows of x, of u, and of an expert's factor have adjacent elements. Rows without a
// token or a group are not read. Null scores are ones. Without indices, scores are of rows.
#pragma once
#include "numerics/floats.h"
#include "numerics/groups.h"
#include "numerics/operand_scales.h"

namespace moe_fp8 {

// x: bfloat16, or FP8 with scales in float32, of whole rows or of blocks of kBlock columns. An element of FP8 is its
// value times its scale, rounded to bfloat16.
struct TokenRows {
  const void* data;
  int64_t stride;         // elements
  bool is_fp8 = false;
  Fp8Type type = {};
  OperandScales scale = {};

  MOE_HD const uint16_t* bfloat16(int64_t token) const { return static_cast<const uint16_t*>(data) + token * stride; }
  MOE_HD const uint8_t* fp8(int64_t token) const { return static_cast<const uint8_t*>(data) + token * stride; }
  MOE_HD const float* scales(int64_t token) const {
    return static_cast<const float*>(scale.data) + token * scale.row_stride;
  }
  MOE_HD int64_t scale_at(int64_t column) const {  // from the row's first scale on
    return scale.block_size ? column / kBlock * scale.block_stride : 0;
  }
};

struct NarrowTokensParams {
  TokenRows x;
  const uint16_t* m;
  const int* offs;
  RowIndex source;  // source.at is null without indices
  uint16_t* out;
  int64_t P, E, R, W;
  int64_t m_expert_stride, m_stride;  // elements
};

struct OuterTokensParams {
  const uint16_t* u;
  TokenRows x;
  const int* offs;
  RowIndex source;
  const float* scores;
  void* out;
  int64_t P, E, R, W;
  int64_t u_stride;  // elements
  bool is_float32;   // out, else bfloat16

  MOE_HD float score(int64_t row) const { return scores ? scores[slot_of(source, row)] : 1.f; }
};

// On the current GPU, where the result is 0 or the runtime's error code, and on the CPU.
int narrow_tokens(const NarrowTokensParams& p, void* stream);
void narrow_tokens_cpu(const NarrowTokensParams& p);
int outer_tokens(const OuterTokensParams& p, void* stream);
void outer_tokens_cpu(const OuterTokensParams& p);

}  // namespace moe_fp8
