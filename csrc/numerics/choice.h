// How a router scores and compares experts. All arithmetic is float32, by operations that every device rounds alike.
#pragma once
#include "numerics/activations.h"

namespace moe_fp8 {

enum class Scoring : int { kSoftmax, kSigmoid };
inline constexpr const char* kScorings[] = {"softmax", "sigmoid"};

constexpr float kSumEpsilon = 1e-20f;  // is added to the sum of a token's scores

// e^(logit - max_logit). NaN if a logit is NaN, or if both are the same infinity. Neither function here branches around
// the power, so the powers of a lane's experts are computed in parallel.
MOE_HD float softmax_term(float logit, float max_logit) {
  const float distance = max_logit - logit, power = exponential(-clamp_max(distance, kExpCutoff));
  return distance == distance ? power : distance;
}

// NaN if the logit is NaN. sigmoid() alone returns a number there, because activations multiply it by the NaN.
MOE_HD Sigmoid sigmoid_scores(float logit) {
  const Sigmoid number = sigmoid(logit);
  return logit == logit ? number : Sigmoid{logit, logit};
}

// Maps floats to integers of the same order: NaN > inf > finite > -inf > kNever > kChosen. kNever: an expert that
// cannot be chosen. kChosen: one that was chosen already. -0 orders before +0; no score plus bias is -0.
constexpr uint32_t kNever = 0x007ffffe, kChosen = 0;
MOE_HD uint32_t ordered_key(float f) {
  const uint32_t bits = as_bits(f);
  return f != f ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
MOE_HD float from_ordered_key(uint32_t key) { return as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

}  // namespace moe_fp8
