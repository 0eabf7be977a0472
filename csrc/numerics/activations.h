// The activations of experts: a curve of the gate, times a factor that depends on the up. All arithmetic is float32, by
// operations that every device rounds alike. A multiply-add is fused only where the code says fmaf.
#pragma once
#include "platform/arithmetic.h"
#include "platform/bits.h"

namespace moe_fp8 {

enum class Curve : int { kSilu, kGelu, kClampedSilu, kRelu2 };

struct ActivationRule {
  const char* name;
  Curve curve;
  bool gated;  // true: h is [P, 2F], gates and ups; false: [P, F]
};
enum class Activation : int { kSwiglu, kGeglu, kClampedSwiglu, kSilu, kGelu, kRelu2 };
inline constexpr ActivationRule kActivations[] = {
    {"swiglu", Curve::kSilu, true}, {"geglu", Curve::kGelu, true}, {"swiglu_oai", Curve::kClampedSilu, true},
    {"silu", Curve::kSilu, false},  {"gelu", Curve::kGelu, false}, {"relu2", Curve::kRelu2, false}};
inline constexpr int kNumActivations = sizeof(kActivations) / sizeof(kActivations[0]);
constexpr bool is_gated(Activation activation) { return kActivations[int(activation)].gated; }

constexpr float kExpCutoff = 88.f;  // below about -88, exponentials are zero

// e^y for y in [-kExpCutoff, 0].
MOE_HD float exponential(float y) {
  constexpr float kLog2E = 0x1.715476p+0f, kLn2 = 0x1.62e430p-1f, kLn2Rest = -0x1.05c610p-29f;
  constexpr float kShift = 0x1.8p+23f + 127;  // adding it rounds to an integer; the low byte is the biased exponent
  constexpr float kP2 = 0x1.fffdfcp-2f, kP3 = 0x1.5557aep-3f, kP4 = 0x1.572a08p-5f, kP5 = 0x1.10627cp-7f;
  const float shifted = fmaf(y, kLog2E, kShift), n = shifted - kShift;
  const float r = fmaf(n, -kLn2Rest, fmaf(n, -kLn2, y));
  const float tail = fmaf(fmaf(fmaf(kP5, r, kP4), r, kP3), r, kP2);
  return fmaf(fmaf(tail, r, 1.f), r, 1.f) * as_float(as_bits(shifted) << 23);
}

// sigmoid(x) and its complement, sigmoid(-x) = 1 - sigmoid(x). Both come from one power, e^-|x|. Neither is a
// difference, so each keeps its relative precision where it is small.
struct Sigmoid { float value, complement; };

MOE_HD Sigmoid sigmoid(float x) {
  const float power = exponential(-clamp_max(magnitude(x), kExpCutoff));  // of a NaN: as of -kExpCutoff
  const float large = reciprocal(1.f + power), small = power * large;
  return x < 0 ? Sigmoid{small, large} : Sigmoid{large, small};
}

// A function's value and derivative at one argument.
struct Point { float value, slope; };

// x * sigmoid(z) and its derivative, where z is a function of x with derivative z_slope.
MOE_HD Point sigmoid_times(float x, float z, float z_slope) {
  const Sigmoid s = sigmoid(z);
  const float value = x * s.value;
  return {value, fmaf(value, s.complement * z_slope, s.value)};
}

// Constants of a clamped SwiGLU. The defaults make it GPT-OSS's gate, "swiglu_oai".
struct Clamp { float alpha = 1.702f, limit = 7.f, offset = 1.f; };

template <Curve kCurve>
MOE_HD Point curve_at(float x, const Clamp& clamp) {
  if constexpr (kCurve == Curve::kSilu) {
    return sigmoid_times(x, x, 1.f);
  } else if constexpr (kCurve == Curve::kGelu) {
    // z = 2 sqrt(2 / pi) (x + 0.044715 x^3). Where the square is clamped, the sigmoid is 0 or 1. The clamp keeps
    // infinity times zero out.
    constexpr float kLinear = 0x1.988454p+0f, kCubic = 0x1.2444f2p-4f, kCubicSlope = 3 * kCubic;
    const float square = clamp_max(x * x, 128.f);
    return sigmoid_times(x, x * fmaf(square, kCubic, kLinear), fmaf(square, kCubicSlope, kLinear));
  } else if constexpr (kCurve == Curve::kClampedSilu) {
    const float clamped = x > clamp.limit ? clamp.limit : x;
    const Point p = sigmoid_times(clamped, clamped * clamp.alpha, clamp.alpha);
    return {p.value, x > clamp.limit ? 0.f : p.slope};
  } else {
    const float positive = x < 0 ? 0.f : x;
    return {positive * positive, positive + positive};
  }
}

// The factor of the gate's value, and the factor's derivative with respect to up.
template <Activation kActivation>
MOE_HD Point up_factor(float up, const Clamp& clamp) {
  constexpr ActivationRule kRule = kActivations[int(kActivation)];
  if constexpr (!kRule.gated) return {1.f, 0.f};
  if constexpr (kRule.curve != Curve::kClampedSilu) return {up, 1.f};
  const bool is_clamped = magnitude(up) > clamp.limit;
  const float limit_of_sign = as_float(as_bits(clamp.limit) | (as_bits(up) & 0x80000000u));
  return {(is_clamped ? limit_of_sign : up) + clamp.offset, is_clamped ? 0.f : 1.f};
}

template <Activation kActivation>
MOE_HD float activated(float gate, float up, const Clamp& clamp) {
  return curve_at<kActivations[int(kActivation)].curve>(gate, clamp).value * up_factor<kActivation>(up, clamp).value;
}

// a, and the gradients of gate and up, given the gradient of a in `grad`.
struct ActivationGradient { float a, gate, up; };
// gate: the curve's value and slope at the gate.
template <Activation kActivation>
MOE_HD ActivationGradient activation_gradient(const Point& gate, float up, float grad, const Clamp& clamp) {
  const Point u = up_factor<kActivation>(up, clamp);
  return {gate.value * u.value, grad * u.value * gate.slope, u.slope == 0 ? 0.f : grad * gate.value};
}
template <Activation kActivation>
MOE_HD ActivationGradient activation_gradient(float gate, float up, float grad, const Clamp& clamp) {
  const Point point = curve_at<kActivations[int(kActivation)].curve>(gate, clamp);
  return activation_gradient<kActivation>(point, up, grad, clamp);
}

}  // namespace moe_fp8
