// The experts that a router chooses for every token, their scores, and the gradient of these.
//
// s [T, E]          = softmax(logits) along E, or sigmoid(logits)
// ids [T, top_k]:     the experts of the largest s + bias, the largest first, of equal ones the smaller id; NaN is the
//                     largest. Of num_groups groups of neighbours those top_groups alone have a part in it whose two
//                     largest add up to most, of equal ones the first.
// scores [T, top_k] = s of these, divided by (their sum + kLeastSum) if normalize, times factor
// topk_logits [T, top_k] = logits of these + 0 * scores, so that they are NaN where scores are
//
// With h = factor * grad of the chosen, c those chosen, N = sum_c s + kLeastSum and A = sum_c h * (s / N):
// w                 = (h - A) / N if normalize, else h; 0 of others
// dlogits [T, E]    = s * (w - sum_c w * s) of softmax; w * (s * sigmoid(-logits)) of sigmoid, 0 of others
//
// Of logits of the chosen alone, [T, top_k] in the order of slots, which share all of the score: s is that of them
// alone, and dlogits are 0 where a logit is -Inf. Each expert stands at one slot of a token at most.
//
// parts 1: dlogits are float32. 2: [T, 2, E] bfloat16, a = RN(dlogits) and RN(dlogits - a).
//
// An id out of [0, E) is no choice; of equal ones the last counts. A sum over experts is taken in an order that
// DESIGN.md defines. Null bias is zero. Rows are so many elements apart as the strides say; those of results are
// contiguous.
#pragma once
#include <cstdint>

#include "numerics/choice.h"

namespace moe_fp8 {

struct ChooseExpertsParams {
  const float* logits;
  const float* bias;
  int64_t* ids;
  float* scores;
  float* topk_logits;
  int64_t T, stride;
  int E, top_k, num_groups, top_groups;
  Scoring scoring;
  bool normalize;
  float factor;
};

struct ChooseExpertsBackwardParams {
  const float* grad;
  const float* logits;
  const void* ids;  // int32, or int64
  void* dlogits;
  int64_t T, grad_stride, stride, ids_stride;
  int E;
  int64_t top_k;
  Scoring scoring;
  bool normalize, is_int64, of_chosen;
  float factor;
  int parts;

  MOE_HD int64_t width() const { return of_chosen ? top_k : E; }  // of logits

  MOE_HD int64_t id(int64_t token, int64_t slot) const {
    const int64_t at = token * ids_stride + slot;
    return is_int64 ? static_cast<const int64_t*>(ids)[at] : static_cast<const int*>(ids)[at];
  }
};

// 0, or the runtime's error code.
int choose_experts(const ChooseExpertsParams& p, void* stream);
int choose_experts_backward(const ChooseExpertsBackwardParams& p, void* stream);

}  // namespace moe_fp8
