// Number formats: the 16- and 32-bit floats of inputs, and four fp8 formats with a software cast. Hardware casts give
// the same bits, so every backend can fall back to it.
#pragma once
#include "platform/convert.h"

namespace moe_fp8 {

enum class InType : int { kBF16, kF16, kF32 };
MOE_HD constexpr int bytes_of(InType type) { return type == InType::kF32 ? 4 : 2; }
enum class Fp8Type : int { kE4M3FN, kE5M2, kE4M3FNUZ, kE5M2FNUZ };
MOE_HD constexpr bool is_e5m2(Fp8Type type) { return type == Fp8Type::kE5M2 || type == Fp8Type::kE5M2FNUZ; }
MOE_HD constexpr bool is_fnuz(Fp8Type type) { return type == Fp8Type::kE4M3FNUZ || type == Fp8Type::kE5M2FNUZ; }

// ---- inputs --------------------------------------------------------------------------------------------------------
// Bits: the stored integer. Without their sign bit, these integers order finite < kInfinity < NaN. from_float() rounds
// to nearest even, and turns every NaN into the quiet one without a sign: 0x7fc0, 0x7e00, 0x7fc00000.
struct BF16 {
  using Bits = uint16_t;
  static constexpr Bits kInfinity = 0x7f80;
  static constexpr uint32_t kMagnitudeMask = 0x7fff7fffu;  // of both halves of a word
  static MOE_HD float to_float(uint32_t bits) { return as_float(bits << 16); }
  static MOE_HD Bits from_float(float f) {
    const uint32_t bits = as_bits(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return Bits((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
  }
};
struct F16 {
  using Bits = uint16_t;
  static constexpr Bits kInfinity = 0x7c00;
  static constexpr uint32_t kMagnitudeMask = 0x7fff7fffu;
  static MOE_HD float to_float(uint32_t bits) {
    if constexpr (kConvertsHalf) return half_to_float(bits);
    const uint32_t sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu, rebias = 112u << 23;
    const uint32_t normal = (magnitude << 13) + rebias;
    // A subnormal gets an implicit 1, which the subtraction removes. So no float32 subnormal occurs, which a CPU may
    // flush to zero.
    const uint32_t subnormal = as_bits(as_float(normal + (1u << 23)) - as_float(rebias + (1u << 23)));
    const uint32_t finite = magnitude < 0x400u ? subnormal : normal;
    return as_float(finite | sign | (magnitude >= 0x7c00u ? 0x7f800000u : 0u));
  }
  static MOE_HD Bits from_float(float f) {
    const uint32_t magnitude = as_bits(f) & 0x7fffffffu, sign = as_bits(f) >> 16 & 0x8000u;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1)) >> 13;
    // The unit of subnormal results, 2^-24, is the ulp of float32 in [0.5, 1): adding 0.5 rounds to it.
    const uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
    const uint32_t code = magnitude < 0x38800000u ? subnormal : magnitude < 0x477ff000u ? normal : 0x7c00u;
    return magnitude > 0x7f800000u ? Bits(0x7e00) : Bits(code | sign);
  }
};
struct F32 {
  using Bits = uint32_t;
  static constexpr Bits kInfinity = 0x7f800000;
  static constexpr uint32_t kMagnitudeMask = 0x7fffffffu;
  static MOE_HD float to_float(uint32_t bits) { return as_float(bits); }
  static MOE_HD Bits from_float(float f) { return f != f ? 0x7fc00000u : as_bits(f); }
};
template <class In>
inline constexpr int kPerWord = 4 / sizeof(typename In::Bits);  // elements in a 32-bit word

// Element i of a word, as float32.
template <class In>
MOE_HD float element(uint32_t word, int i) {
  if constexpr (sizeof(typename In::Bits) == 4) return In::to_float(word);
  else return In::to_float(i ? word >> 16 : word & 0xffffu);
}
template <>
MOE_HD float element<BF16>(uint32_t word, int i) { return as_float(i ? word & 0xffff0000u : word << 16); }

// ---- fp8 ---------------------------------------------------------------------------------------------------------
// kMaxBits: the float32 bits of kMax. kMaxCode: the byte of kMax.
template <int kMantissa_, int kBias_, int kMax_, uint32_t kMaxBits_, uint8_t kMaxCode_, uint8_t kNan_>
struct Fp8Constants {
  static constexpr int kMantissa = kMantissa_, kBias = kBias_;
  static constexpr float kMax = kMax_;
  static constexpr uint32_t kMaxBits = kMaxBits_;
  static constexpr uint8_t kMaxCode = kMaxCode_, kNan = kNan_;
  static constexpr bool kNegativeZero = kNan != 0x80;  // FNUZ formats have NaN in its place
};
template <Fp8Type>
struct Fp8;
template <>
struct Fp8<Fp8Type::kE4M3FN> : Fp8Constants<3, 7, 448, 0x43e00000u, 0x7e, 0x7f> {};
template <>
struct Fp8<Fp8Type::kE5M2> : Fp8Constants<2, 15, 57344, 0x47600000u, 0x7b, 0x7f> {};
template <>
struct Fp8<Fp8Type::kE4M3FNUZ> : Fp8Constants<3, 8, 240, 0x43700000u, 0x7f, 0x80> {};
template <>
struct Fp8<Fp8Type::kE5M2FNUZ> : Fp8Constants<2, 16, 57344, 0x47600000u, 0x7f, 0x80> {};

// The constants of a format that a cast needs, for code that knows the format at run time only.
struct Fp8Values {
  int mantissa, bias;
  uint32_t max_bits;
  uint8_t nan;
  bool negative_zero;

  template <Fp8Type kType>
  static MOE_HD constexpr Fp8Values of() {
    using T = Fp8<kType>;
    return {T::kMantissa, T::kBias, T::kMaxBits, T::kNan, T::kNegativeZero};
  }
  static MOE_HD constexpr Fp8Values of(Fp8Type type) {
    switch (type) {
      case Fp8Type::kE4M3FN: return of<Fp8Type::kE4M3FN>();
      case Fp8Type::kE5M2: return of<Fp8Type::kE5M2>();
      case Fp8Type::kE4M3FNUZ: return of<Fp8Type::kE4M3FNUZ>();
      default: return of<Fp8Type::kE5M2FNUZ>();
    }
  }
};

// Rounds f to nearest even. f must not be NaN, nor so large that it rounds beyond kMax: x * m is never either, unless m
// is NaN. Other values of f give an unspecified byte. It has no branch, so loops over it vectorize. The comparison is
// signed, because SSE2 has no unsigned one.
MOE_HD uint8_t fp8_from_scaled(const Fp8Values& t, float f) {
  const int shift = 23 - t.mantissa;
  const int32_t min_normal = int32_t(128 - t.bias) << 23;  // 2^(1 - bias)
  const uint32_t magnitude = as_bits(f) & 0x7fffffffu;
  const int32_t power = int32_t(magnitude & 0x7f800000u), exponent = power > min_normal ? power : min_normal;
  // The float adder rounds. After adding 2^shift times f's power of two, one ulp is one unit of the result, and the low
  // bits are the result's significand with its leading 1. The exponent above the smallest one is added to these bits.
  const uint32_t sum = as_bits(as_float(magnitude) + as_float(uint32_t(exponent) + (uint32_t(shift) << 23)));
  const uint32_t code = (sum + uint32_t((exponent - min_normal) >> shift)) & 0x7fu, sign = as_bits(f) >> 24 & 0x80u;
  return uint8_t(t.negative_zero || code != 0 ? code | sign : 0);
}
template <Fp8Type kType>
MOE_HD uint8_t fp8_from_scaled(float f) { return fp8_from_scaled(Fp8Values::of<kType>(), f); }

// Casts any f: rounds to nearest even and saturates to +-kMax. NaN becomes the format's canonical NaN.
MOE_HD uint8_t fp8_from_float(const Fp8Values& t, float f) {
  const uint32_t bits = as_bits(f), magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return t.nan;
  return fp8_from_scaled(t, magnitude < t.max_bits ? f : as_float(t.max_bits | (bits & 0x80000000u)));
}
template <Fp8Type kType>
MOE_HD uint8_t fp8_from_float(float f) { return fp8_from_float(Fp8Values::of<kType>(), f); }

template <Fp8Type kType>
MOE_HD float fp8_to_float(uint8_t q) {
  using T = Fp8<kType>;
  const uint32_t magnitude = q & 0x7fu, sign = uint32_t(q & 0x80u) << 24;
  const bool nan = T::kNegativeZero ? magnitude > T::kMaxCode : q == T::kNan;
  if (nan) {  // only E5M2 has infinities
    if (kType == Fp8Type::kE5M2 && magnitude == 0x7cu) return as_float(sign | 0x7f800000u);
    return as_float(0x7fc00000u);
  }
  const uint32_t rebias = uint32_t(127 - T::kBias) << 23, unit = uint32_t(128 - T::kBias - T::kMantissa) << 23;
  const uint32_t normal = (magnitude << (23 - T::kMantissa)) + rebias;
  const uint32_t subnormal = as_bits(float(magnitude) * as_float(unit));
  return as_float((magnitude >> T::kMantissa ? normal : subnormal) | sign);
}

}  // namespace moe_fp8
