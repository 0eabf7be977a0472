// The experts that a router chooses for every token, their scores, and the gradient of these scores.
//
// s [T, E]          = softmax(logits) along E, sigmoid(logits), or sqrt(softplus(logits))
// ids [T, top_k]:     the experts of the largest s + bias, the largest first; of equal ones the smaller id first. NaN
//                     is the largest. With num_groups groups of neighbouring experts, only top_groups of them take
//                     part: those whose two largest s + bias have the largest sums, or whose largest s + bias is the
//                     largest; of equal ones the first group. If given_ids are not null, they are the choice instead:
//                     a slot without an expert has the id -1, score 0 and logit 0, and no part in the sum; an expert
//                     at several slots has one part.
// scores [T, top_k] = s of these, divided by (their sum + kSumEpsilon) if normalize, times factor
// topk_logits [T, top_k] = logits of these + 0 * scores, so that they are NaN where scores are
//
// Backward, with h = factor * grad of the chosen experts, c the chosen experts, N = sum_c s + kSumEpsilon and
// A = sum_c h * (s / N):
// w                 = (h - A) / N if normalize, else h; 0 for other experts
// dlogits [T, E]    = softmax: s * (w - sum_c w * s);  else w * (the derivative of s), 0 for other experts
//
// If chosen_only, logits hold the chosen experts alone, [T, top_k] in the order of slots, and these experts share all
// of the score: s is computed from their logits alone. dlogits are 0 where such a logit is -Inf. Each expert stands at
// one slot of a token at most.
//
// parts 1: dlogits are float32. parts 2: [T, 2, E] bfloat16, a = RN(dlogits) and RN(dlogits - a).
//
// An id out of [0, E) is no choice; if an id is there twice, the last slot counts. Sums over experts are taken in the
// order that DESIGN.md defines. Null bias is zero. Strides are in elements, from row to row; results are contiguous.
#pragma once
#include <cstdint>

#include "numerics/choice.h"
#include "tokens/slot_ids.h"

namespace moe_fp8 {

struct ChooseExpertsParams {
  const float* logits;
  const float* bias;
  int64_t* ids;
  float* scores;
  float* topk_logits;
  int64_t T, stride;
  int E, top_k, num_groups, top_groups;
  GroupScore group_score;
  SlotIds given_ids;
  Scoring scoring;
  bool normalize;
  float factor;
};

struct ChooseExpertsBackwardParams {
  const float* grad;
  const float* logits;
  SlotIds ids;
  void* dlogits;
  int64_t T, grad_stride, stride;
  int E;
  int64_t top_k;
  Scoring scoring;
  bool normalize, chosen_only;
  float factor;
  int parts;

  MOE_HD int64_t width() const { return chosen_only ? top_k : E; }  // of a row of logits
};

int choose_experts(const ChooseExpertsParams& p, void* stream);
void choose_experts_cpu(const ChooseExpertsParams& p);
int choose_experts_backward(const ChooseExpertsBackwardParams& p, void* stream);
void choose_experts_backward_cpu(const ChooseExpertsBackwardParams& p);

}  // namespace moe_fp8
