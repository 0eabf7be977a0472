// Elementwise steps of a quantizing kernel: amax of words, cast to fp8.
#pragma once
#include "numerics/scale.h"

namespace moe_fp8 {

// Largest magnitude, NaN > Inf > finite; 16-bit inputs go two to a word. The sign bits of a result mean nothing.
template <class In>
MOE_DEVICE uint32_t max_magnitude(uint32_t a, uint32_t b) {
  if constexpr (std::is_same_v<In, BF16>) return max_magnitude_bf16x2(a, b);
  else if constexpr (std::is_same_v<In, F16>) return max_magnitude_f16x2(a, b);
  else {
    const uint32_t x = a & 0x7fffffffu, y = b & 0x7fffffffu;
    return x > y ? x : y;
  }
}
// float32 bits of magnitude i of a word of such results.
template <class In>
MOE_DEVICE uint32_t magnitude_bits(uint32_t word, int i) { return as_bits(element<In>(word, i)) & 0x7fffffffu; }
// Of a pair of such results in two words: {max of a's halves, max of b's halves}.
template <class In>
MOE_DEVICE uint32_t max_within(uint32_t a, uint32_t b) {
  static_assert(kPerWord<In> == 2);
  return max_magnitude<In>((a & 0xffffu) | b << 16, a >> 16 | (b & 0xffff0000u));
}

template <Fp8Type kOut>
inline constexpr bool kCastsInHardware =
    kHardwareFp8 == HardwareFp8::kFN     ? kOut == Fp8Type::kE4M3FN || kOut == Fp8Type::kE5M2
    : kHardwareFp8 == HardwareFp8::kFNUZ ? kOut == Fp8Type::kE4M3FNUZ || kOut == Fp8Type::kE5M2FNUZ
                                         : false;

// Four floats to four fp8 bytes, a in byte 0.
template <Fp8Type kOut>
MOE_DEVICE uint32_t cast4(float a, float b, float c, float d) {
  if constexpr (!kCastsInHardware<kOut>) {
    return fp8_from_float<kOut>(a) | uint32_t(fp8_from_float<kOut>(b)) << 8 |
           uint32_t(fp8_from_float<kOut>(c)) << 16 | uint32_t(fp8_from_float<kOut>(d)) << 24;
  } else if constexpr (Fp8<kOut>::kMantissa == 3) {
    return convert_e4m3x4(a, b, c, d);
  } else {
    return convert_e5m2x4(a, b, c, d);
  }
}

// Four neighbouring elements, scaled by one multiplier. `words` holds 4 / kPerWord<In> words.
template <class In, Fp8Type kOut>
MOE_DEVICE uint32_t cast4_words(const uint32_t* words, float multiplier) {
  constexpr int n = kPerWord<In>;
  return cast4<kOut>(element<In>(words[0], 0) * multiplier, element<In>(words[1 / n], 1 % n) * multiplier,
                     element<In>(words[2 / n], 2 % n) * multiplier, element<In>(words[3 / n], 3 % n) * multiplier);
}

}  // namespace moe_fp8
