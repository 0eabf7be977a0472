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
#include "numerics/groups.h"

namespace moe_fp8 {

// The slot, and the token, of a sorted row, or -1. Without indices, both are the row itself.
MOE_HD int slot_of(const RowIndex& source, int64_t row) { return source.at ? source.slot(row) : int(row); }
MOE_HD int64_t token_of(const RowIndex& source, int64_t row) { return source.at ? source.row(row) : row; }

struct NarrowTokensParams {
  const uint16_t* x;
  const uint16_t* m;
  const int* offs;
  RowIndex source;  // source.at is null without indices
  uint16_t* out;
  int64_t P, E, R, W;
  int64_t x_stride, m_expert_stride, m_stride;  // elements
};

struct OuterTokensParams {
  const uint16_t* u;
  const uint16_t* x;
  const int* offs;
  RowIndex source;
  const float* scores;
  void* out;
  int64_t P, E, R, W;
  int64_t u_stride, x_stride;  // elements
  bool is_float32;             // out, else bfloat16
};

// On the current GPU, where the result is 0 or the runtime's error code, and on the CPU.
int narrow_tokens(const NarrowTokensParams& p, void* stream);
void narrow_tokens_cpu(const NarrowTokensParams& p);
int outer_tokens(const OuterTokensParams& p, void* stream);
void outer_tokens_cpu(const OuterTokensParams& p);

}  // namespace moe_fp8
