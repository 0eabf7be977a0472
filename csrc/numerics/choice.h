// How a router scores and compares experts: in float32, by operations that every device rounds alike.
#pragma once
#include "numerics/activations.h"

namespace moe_fp8 {

enum class Scoring : int { kSoftmax, kSigmoid };
inline constexpr const char* kScorings[] = {"softmax", "sigmoid"};

constexpr float kSumEpsilon = 1e-20f;  // is added to the sum of a token's scores

// e^(logit - most), where most is the largest; NaN where one of them is, or both are the same infinity. No branch
// around the power, here and below: those of a lane's experts are computed side by side.
MOE_HD float softmax_term(float logit, float most) {
  const float below = most - logit, of_number = exponential(-clamp_max(below, kExpCutoff));
  return below == below ? of_number : below;
}

// NaN where the logit is; sigmoid() gives activations numbers there, which they multiply with the NaN.
MOE_HD Sigmoid sigmoid_scores(float logit) {
  const Sigmoid of_number = sigmoid(logit);
  return logit == logit ? of_number : Sigmoid{logit, logit};
}

// Integers in the order of floats: NaN > inf > finite > -inf > kNever > kChosen. Of zeros it takes the positive one: no
// sum of a score is another.
constexpr uint32_t kNever = 0x007ffffe, kChosen = 0;
MOE_HD uint32_t ordered_key(float f) {
  const uint32_t bits = as_bits(f);
  return f != f ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
MOE_HD float from_ordered_key(uint32_t key) { return as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

}  // namespace moe_fp8
