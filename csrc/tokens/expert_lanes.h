// The experts of a token, spread over the lanes of a wave: their logits, which become scores, and sums over them.
#pragma once
#include "numerics/floats.h"
#include "platform/memory.h"
#include "primitives/wave_rows.h"
#include "tokens/choose_experts.h"
#include "tokens/policy.h"

namespace moe_fp8 {

constexpr uint32_t kMinusInfinity = 0xff800000u;

// A lane has kPerLane of a token's kExperts experts: fours of neighbours, 4 W experts apart (W lanes a wave).
//
//   experts   0..3    4..7   ...  4W-4..4W-1 | 4W..4W+3  ...
//   lane       0       1             W - 1   |    0      ...
template <int kExperts>
struct ExpertLanes {
  static constexpr int kLanes = kWarpSize, kMaxTokensPerWave = 1;
  static constexpr int kFours = kExperts / 4 > kWarpSize ? kExperts / 4 / kWarpSize : 1, kPerLane = 4 * kFours;
  const int lane = threadIdx.x % kWarpSize;

  MOE_DEVICE int expert(int i) const { return 4 * (i / 4 * kWarpSize + lane) + i % 4; }  // rises with i

  // Calls f(values, first expert) for every four that begins before expert `end`.
  template <class T, class F>
  MOE_DEVICE void each_four(T (&values)[kPerLane], int end, F f) const {
#pragma unroll
    for (int v = 0; v < kFours; ++v)
      if (expert(4 * v) < end) f(values + 4 * v, expert(4 * v));
  }
  // vectors: true if fours are whole and lie at multiples of 16 bytes.
  MOE_DEVICE void load(const float* row, int E, bool vectors, float missing, float (&x)[kPerLane]) const {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = missing;
    each_four(x, E, [&](float* four, int at) {
      if (vectors) {
        const Vec16 v = *reinterpret_cast<const Vec16*>(row + at);
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = as_float(v.w[i]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = at + i < E ? row[at + i] : missing;
      }
    });
  }

  // The sum over all experts, in every lane, in the order that DESIGN.md defines.
  static MOE_DEVICE float sum(const float (&x)[kPerLane]) {
    float fours[kFours];
#pragma unroll
    for (int v = 0; v < kFours; ++v) fours[v] = (x[4 * v] + x[4 * v + 1]) + (x[4 * v + 2] + x[4 * v + 3]);
#pragma unroll
    for (int half = kFours / 2; half > 0; half /= 2)
#pragma unroll
      for (int v = 0; v < half; ++v) fours[v] += fours[v + half];
    return wave_sum(fours[0]) + 0.f;  // turns -0 into +0
  }
  static MOE_DEVICE uint32_t max(uint32_t v) { return wave_max(v); }
};

// Turns each logit into its score, and writes the derivatives of the scores.
template <Scoring kScoring, int n>
MOE_DEVICE void score_each(float (&x)[n], float (&slope)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const Point score = score_at<kScoring>(x[i]);
    x[i] = score.value;
    slope[i] = score.slope;
  }
}

// Turns logits into scores. slope: the derivatives of scores, not written for softmax.
template <class L>
MOE_DEVICE void score_logits(Scoring scoring, float (&x)[L::kPerLane], float (&slope)[L::kPerLane]) {
  constexpr int n = L::kPerLane;
  if (scoring == Scoring::kSigmoid) return score_each<Scoring::kSigmoid>(x, slope);
  if (scoring == Scoring::kSqrtSoftplus) return score_each<Scoring::kSqrtSoftplus>(x, slope);
  float max_logit = x[0];  // may pass over a NaN, which then is one of the terms and so reaches their sum
#pragma unroll
  for (int i = 1; i < n; ++i) max_logit = x[i] > max_logit ? x[i] : max_logit;
  max_logit = from_ordered_key(L::max(ordered_key(max_logit)));
#pragma unroll
  for (int i = 0; i < n; ++i) x[i] = softmax_term(x[i], max_logit);
  const float scale = 1.f / L::sum(x);
#pragma unroll
  for (int i = 0; i < n; ++i) x[i] *= scale;
}

// True if fours of experts lie at multiples of 16 bytes in every row of both matrices.
inline bool fours_are_aligned(int E, int64_t T, int64_t stride, const void* a, const void* b = nullptr) {
  const uint64_t row_distance = T > 1 ? stride * sizeof(float) : 0;
  return E % 4 == 0 && (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | row_distance) % 16 == 0;
}

// Calls f with the smallest number of experts that a kernel is instantiated for and that holds E.
template <class F>
int dispatch_expert_count(int E, F f) {
  if (E <= 128) return f(std::integral_constant<int, 128>{});
  if (E <= 256) return f(std::integral_constant<int, 256>{});
  if (E <= 512) return f(std::integral_constant<int, 512>{});
  return f(std::integral_constant<int, kMaxExperts>{});
}

}  // namespace moe_fp8
