// The fp8 conversions of instructions. Floats are rounded to nearest even and do not saturate. Overflow gives an
// infinity if the format has one, and otherwise NaN. A NaN keeps its sign if the format allows it. Kernels must not
// rely on more.
#pragma once
#include <algorithm>
#include <cmath>

namespace simt {

#if defined(__gfx942__)
constexpr bool kFnuz = true;
#else
constexpr bool kFnuz = false;
#endif

inline unsigned fp8_from_float(float x, int mantissa_bits, float max, bool has_infinity) {
  const int bias = (1 << (6 - mantissa_bits)) - (kFnuz ? 0 : 1);
  const unsigned sign = std::signbit(x) ? 0x80 : 0, nan = kFnuz ? 0x80 : sign | 0x7f;
  if (std::isnan(x)) return nan;
  // Units of the last place: 2^(exponent - mantissa_bits). Subnormals have the smallest exponent.
  const int exponent = x == 0 ? 1 - bias : std::max(std::isinf(x) ? 128 : std::ilogb(x), 1 - bias);
  const double units = std::nearbyint(std::ldexp(std::fabs(double(x)), mantissa_bits - exponent));
  if (std::ldexp(units, exponent - mantissa_bits) > max) return has_infinity ? sign | 0x7c : nan;
  const unsigned code = (unsigned(exponent + bias - 1) << mantissa_bits) + unsigned(units);
  return kFnuz && code == 0 ? 0 : sign | code;
}

inline unsigned e4m3_from_float(float x) { return fp8_from_float(x, 3, kFnuz ? 240.f : 448.f, false); }
inline unsigned e5m2_from_float(float x) { return fp8_from_float(x, 2, 57344.f, !kFnuz); }

inline float fp8_to_float(unsigned code, int mantissa_bits) {
  const int bias = (1 << (6 - mantissa_bits)) - (kFnuz ? 0 : 1), exponent = int(code & 0x7f) >> mantissa_bits;
  const unsigned mantissa = code & ((1u << mantissa_bits) - 1), all = 0x7f >> mantissa_bits;
  if (kFnuz ? code == 0x80 : (code & 0x7f) == 0x7f) return NAN;
  const float sign = code & 0x80 ? -1.f : 1.f;
  if (!kFnuz && mantissa_bits == 2 && unsigned(exponent) == all) return mantissa ? NAN : sign * INFINITY;
  const unsigned significand = exponent ? mantissa | 1u << mantissa_bits : mantissa;
  return sign * std::ldexp(float(significand), (exponent ? exponent : 1) - bias - mantissa_bits);
}

// Replaces the lower or upper two bytes of `old`.
inline int pack_half(unsigned a, unsigned b, int old, bool upper) {
  const unsigned pair = a | b << 8, word = unsigned(old);
  return int(upper ? (word & 0xffffu) | pair << 16 : (word & 0xffff0000u) | pair);
}

}  // namespace simt
