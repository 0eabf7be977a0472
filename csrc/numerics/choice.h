// How a router scores and compares experts. All arithmetic is float32, by operations that every device rounds alike.
#pragma once
#include "numerics/activations.h"

namespace moe_fp8 {

enum class Scoring : int { kSoftmax, kSigmoid, kSqrtSoftplus };
inline constexpr const char* kScorings[] = {"softmax", "sigmoid", "sqrtsoftplus"};

// The value of a group of experts: the sum of its two best, or its best alone.
enum class GroupScore : int { kTopTwoSum, kMax };
inline constexpr const char* kGroupScores[] = {"top2_sum", "max"};

constexpr float kSumEpsilon = 1e-20f;  // is added to the sum of a token's scores

// e^(logit - max_logit). NaN if a logit is NaN, or if both are the same infinity. Neither function here branches around
// the power, so the powers of a lane's experts are computed in parallel.
MOE_HD float softmax_term(float logit, float max_logit) {
  const float distance = max_logit - logit, power = exponential(-clamp_max(distance, kExpCutoff));
  return distance == distance ? power : distance;
}

// log(1 + p) for p in [0, 1]. It is 2 atanh(u / 2) with u = p / (1 + p / 2), which has a series in u^2. The terms
// beyond the first eight are less than 2e-9 of the sum. No intermediate that matters is subnormal if p is not.
MOE_HD float log_one_plus(float p) {
  constexpr float kC1 = 1.f / (3 * 4), kC2 = 1.f / (5 * 16), kC3 = 1.f / (7 * 64), kC4 = 1.f / (9 * 256),
                  kC5 = 1.f / (11 * 1024), kC6 = 1.f / (13 * 4096), kC7 = 1.f / (15 * 16384);
  const float u = p * reciprocal(1.f + 0.5f * p), w = u * u;
  const float tail = fmaf(fmaf(fmaf(fmaf(fmaf(fmaf(kC7, w, kC6), w, kC5), w, kC4), w, kC3), w, kC2), w, kC1);
  return fmaf(u, tail * w, u);
}

// RN32(1 / x) for x from 2^-126 to below 2^126. A division handles all numbers, but takes more registers.
MOE_HD float reciprocal_of_normal(float x) {
  const uint32_t exponent = as_bits(x) & 0x7f800000u, mantissa = as_bits(x) & 0x007fffffu;
  return reciprocal(as_float(mantissa | 0x3f800000u)) * as_float(0x7f000000u - exponent);
}

// The score of a logit and the score's derivative; both are NaN if the logit is. sigmoid() alone returns a number
// there, because activations multiply it by the NaN. kSoftmax is no such function: its scores depend on all logits.
template <Scoring kScoring>
MOE_HD Point score_at(float logit) {
  const Sigmoid s = sigmoid(logit);
  Point score = {s.value, s.value * s.complement};
  if constexpr (kScoring == Scoring::kSqrtSoftplus) {
    const float power = exponential(-clamp_max(magnitude(logit), kExpCutoff));
    const float root = sqrtf(log_one_plus(power) + (logit > 0 ? logit : 0.f));
    const bool has_slope = root > 0 && root < as_float(0x7f800000u);
    score = {root, has_slope ? 0.5f * (s.value * reciprocal_of_normal(root)) : 0.f};
  }
  return logit == logit ? score : Point{logit, logit};
}

// Maps floats to integers of the same order: NaN > inf > finite > -inf > kNever > kChosen. kNever: an expert that
// cannot be chosen. kChosen: one that was chosen already. -0 orders before +0; no score plus bias is -0.
constexpr uint32_t kNever = 0x007ffffe, kChosen = 0;
MOE_HD uint32_t ordered_key(float f) {
  const uint32_t bits = as_bits(f);
  return f != f ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
MOE_HD float from_ordered_key(uint32_t key) { return as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// The key of a group, given the keys of its best two experts. A group of one expert has the key of that expert.
MOE_HD uint32_t group_key(GroupScore group_score, int group_size, uint32_t first, uint32_t second) {
  if (group_score == GroupScore::kMax || group_size == 1) return first;
  return ordered_key(from_ordered_key(first) + from_ordered_key(second));
}

}  // namespace moe_fp8
