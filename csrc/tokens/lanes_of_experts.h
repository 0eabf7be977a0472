// A token's experts in the lanes of a wave: their logits, which become scores, sums over them, and how many they hold.
#pragma once
#include "numerics/floats.h"
#include "platform/memory.h"
#include "primitives/wave_rows.h"
#include "tokens/choose_experts.h"

namespace moe_fp8 {

constexpr uint32_t kMinusInfinity = 0xff800000u;

// What a lane has of a token's kExperts: fours of neighbours, which are a wave's fours apart.
//
//   experts   0..3    4..7   ...  4W-4..4W-1 | 4W..4W+3  ...
//   lane       0       1             W - 1   |    0      ...
template <int kExperts>
struct Lane {
  static constexpr int kLanes = kWarpSize, kMostTokens = 1;  // of a wave
  static constexpr int kFours = kExperts / 4 > kWarpSize ? kExperts / 4 / kWarpSize : 1, n = 4 * kFours;
  const int lane = threadIdx.x % kWarpSize;

  MOE_DEVICE int expert(int i) const { return 4 * (i / 4 * kWarpSize + lane) + i % 4; }  // rises with i

  // f(values, expert of the first) of every four that begins before expert `end`.
  template <class T, class F>
  MOE_DEVICE void each_four(T (&values)[n], int end, F f) const {
#pragma unroll
    for (int v = 0; v < kFours; ++v)
      if (expert(4 * v) < end) f(values + 4 * v, expert(4 * v));
  }
  // vectors: whether fours are whole and lie at multiples of 16 bytes.
  MOE_DEVICE void load(const float* row, int E, bool vectors, float missing, float (&x)[n]) const {
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = missing;
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

  // Over all experts; all lanes have it.
  static MOE_DEVICE float sum(const float (&x)[n]) {
    float fours[kFours];
#pragma unroll
    for (int v = 0; v < kFours; ++v) fours[v] = (x[4 * v] + x[4 * v + 1]) + (x[4 * v + 2] + x[4 * v + 3]);
#pragma unroll
    for (int half = kFours / 2; half > 0; half /= 2)
#pragma unroll
      for (int v = 0; v < half; ++v) fours[v] += fours[v + half];
    return wave_sum(fours[0]) + 0.f;  // no -0
  }
  static MOE_DEVICE uint32_t max(uint32_t v) { return warp_max(v); }
};

// Logits become scores; slope: their derivatives, of sigmoid alone.
template <class L>
MOE_DEVICE void score_logits(Scoring scoring, float (&x)[L::n], float (&slope)[L::n]) {
  if (scoring == Scoring::kSigmoid) {
#pragma unroll
    for (int i = 0; i < L::n; ++i) {
      const Sigmoid s = sigmoid_scores(x[i]);
      x[i] = s.of_x;
      slope[i] = s.of_x * s.of_minus_x;
    }
    return;
  }
  float most = x[0];  // a NaN that it passes by is one of the terms, and so in their sum
#pragma unroll
  for (int i = 1; i < L::n; ++i) most = x[i] > most ? x[i] : most;
  most = unordered(L::max(ordered(most)));
#pragma unroll
  for (int i = 0; i < L::n; ++i) x[i] = softmax_term(x[i], most);
  const float scale = 1.f / L::sum(x);
#pragma unroll
  for (int i = 0; i < L::n; ++i) x[i] *= scale;
}

// Whether fours of experts lie at multiples of 16 bytes in all of these, and between rows.
inline bool is_of_fours(int E, int64_t T, int64_t stride, const void* a, const void* b = nullptr) {
  const uint64_t between = T > 1 ? stride * sizeof(float) : 0;
  return E % 4 == 0 && (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | between) % 16 == 0;
}

// f(constant): the experts that a wave has room for.
template <class F>
int with_room(int E, F f) {
  if (E <= 128) return f(std::integral_constant<int, 128>{});
  if (E <= 256) return f(std::integral_constant<int, 256>{});
  if (E <= 512) return f(std::integral_constant<int, 512>{});
  return f(std::integral_constant<int, kMaxExperts>{});
}

}  // namespace moe_fp8
