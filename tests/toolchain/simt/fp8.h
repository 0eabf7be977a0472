// The fp8 conversion instructions: round to nearest even, and no saturation. What overflows becomes an infinity where
// the format has one, else NaN, and a NaN keeps its sign where the format lets it: kernels must not rely on better.
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
  // Units of the last place: 2^(exponent - mantissa_bits), where the smallest exponent is that of the subnormals.
  const int exponent = x == 0 ? 1 - bias : std::max(std::isinf(x) ? 128 : std::ilogb(x), 1 - bias);
  const double units = std::nearbyint(std::ldexp(std::fabs(double(x)), mantissa_bits - exponent));
  if (std::ldexp(units, exponent - mantissa_bits) > max) return has_infinity ? sign | 0x7c : nan;
  const unsigned code = (unsigned(exponent + bias - 1) << mantissa_bits) + unsigned(units);
  return kFnuz && code == 0 ? 0 : sign | code;
}

inline unsigned e4m3_from_float(float x) { return fp8_from_float(x, 3, kFnuz ? 240.f : 448.f, false); }
inline unsigned e5m2_from_float(float x) { return fp8_from_float(x, 2, 57344.f, !kFnuz); }

// Two bytes into the lower or upper half of `old`.
inline int pack_half(unsigned a, unsigned b, int old, bool upper) {
  const unsigned pair = a | b << 8, word = unsigned(old);
  return int(upper ? (word & 0xffffu) | pair << 16 : (word & 0xffff0000u) | pair);
}

}  // namespace simt
