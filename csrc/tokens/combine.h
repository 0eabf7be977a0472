// Rows of slots back into rows of tokens, weighted by the router's scores, and the gradients of this sum.
//
// out[t]     = sum over rising j of RN32(scores[t, j] * y[inverse[t, j]]), in float32 from 0, rounded once
// grad_y[r]  = scores[slot] * grad[slot / top_k], rounded once, for the largest slot with inverse[slot] == r, else 0
// grad_scores[slot] = sum over k of grad[slot / top_k, k] * y[r, k] in float32, if grad_y[r] is this slot's, else 0
//
// Without grad_y, any slots may share rows of y, and each has the gradient of its score.
//
// y [P, K], grad [T, K], out and grad_y have one dtype. inverse and scores [T, top_k] are contiguous. Null scores are
// ones. A slot whose inverse is out of [0, P) is left out.
#pragma once
#include <cstdint>

#include "numerics/floats.h"

namespace moe_fp8 {

struct CombineParams {
  const void* y;
  const int* inverse;
  const void* scores;
  void* out;
  int64_t T, top_k, P, K;
  int64_t y_stride;  // elements
  InType in;
  bool scores_f32;   // false: scores have the dtype of y
};

struct CombineBackwardParams {
  const void* grad;
  const void* y;         // not read if grad_scores is null
  const int* inverse;
  const void* scores;
  int* slot_of;          // scratch, [P]: the slot of each row; not used without grad_y
  void* grad_y;          // null: not wanted
  void* grad_scores;     // in the dtype of scores; null: not wanted
  int64_t T, top_k, P, K;
  int64_t grad_stride, y_stride;  // elements
  InType in;
  bool scores_f32;
};

template <class In>
MOE_HD float score_of(const void* scores, bool f32, int64_t slot) {
  if (scores == nullptr) return 1.f;
  if (f32) return static_cast<const float*>(scores)[slot];
  return In::to_float(static_cast<const typename In::Bits*>(scores)[slot]);
}

int combine(const CombineParams& p, void* stream);
void combine_cpu(const CombineParams& p);
int combine_backward(const CombineBackwardParams& p, void* stream);
void combine_backward_cpu(const CombineBackwardParams& p);

}  // namespace moe_fp8
