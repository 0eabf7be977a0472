// Scale rules: the multiplier of the cast and the stored scale follow from the amax of a scaling block.
#pragma once
#include "numerics/floats.h"
#include "platform/convert.h"

namespace moe_fp8 {

// Float scales:  multiplier = RN32(FP8_MAX / max(amax, 1e-12)), its mantissa cleared when pow2;
//                stored     = RN32(1 / multiplier);  both are NaN if the block holds a NaN or an Inf.
struct ScaleF32 {
  using Stored = float;
  float multiplier;

  MOE_HD Stored stored() const { return multiplier != multiplier ? multiplier : 1.f / multiplier; }

  // amax_bits: float32 bits of max |x|.
  template <Fp8Type kType>
  static MOE_HD ScaleF32 from_amax(uint32_t amax_bits, bool pow2) {
    if (amax_bits >= 0x7f800000u) return {as_float(0x7fc00000u)};
    constexpr float kFloor = 1e-12f;
    const float amax = as_float(amax_bits);
    float m = Fp8<kType>::kMax / (amax > kFloor ? amax : kFloor);
    if (pow2) m = as_float(as_bits(m) & 0xff800000u);
    return {m};
  }
};

// By how many float32 ulps an amax may exceed FP8_MAX while its exact product with RN32(1 / FP8_MAX) does not exceed
// `limit`.
template <Fp8Type kType>
MOE_HD constexpr uint32_t ulps_above_max(double limit) {
  double ulp = 1;
  while (ulp * 2 <= Fp8<kType>::kMax) ulp *= 2;
  ulp /= 1 << 23;
  uint32_t n = 0;
  while ((Fp8<kType>::kMax + (n + 1) * ulp) * (1.f / Fp8<kType>::kMax) <= limit) ++n;
  return n;
}

// E8M0 scales: byte e stands for 2^(e - 127), 255 for NaN; multiplier = 2^(127 - e).
//   floor:  2^(e - 127) = 2^(floor(log2 amax) - floor(log2 FP8_MAX)), but at least 2^-127
//   rceil:  2^(e - 127) = RN32(amax * RN32(1 / FP8_MAX)) rounded up to a power of two, but at least 2^-127
// Except for NaN, e is at most 248: the largest float32 in E4M3FNUZ. So every multiplier is a normal number.
struct ScaleE8M0 {
  using Stored = uint8_t;
  float multiplier;

  // The multiplier's exponent bits are 254 - e, or 255 in a NaN.
  MOE_HD Stored stored() const { return Stored(254 - (as_bits(multiplier) >> 23)); }

  template <Fp8Type kType>
  static MOE_HD ScaleE8M0 from_amax(uint32_t amax_bits, bool floor) {
    if (amax_bits >= 0x7f800000u) return {as_float(0x7fc00000u)};
    uint32_t e;
    if (floor) e = rounded_down<kType>(amax_bits);
    else if constexpr (kConvertsE8M0) e = e8m0_rounded_up(as_float(amax_bits) * (1.f / Fp8<kType>::kMax));
    else e = rounded_up<kType>(amax_bits);
    return {as_float((254 - e) << 23)};
  }

 private:
  template <Fp8Type kType>
  static MOE_HD uint32_t rounded_down(uint32_t amax_bits) {
    constexpr uint32_t kEmax = (Fp8<kType>::kMaxBits >> 23) - 127;
    const uint32_t exponent = amax_bits >> 23;  // 0 for a subnormal, which gives e = 0
    return exponent > kEmax ? exponent - kEmax : 0;
  }
  // Computed in integers, because a CPU may flush subnormals to zero. The rounded product is at most 2^(e - 127) up to
  // a largest amax, and the bits of these largest amaxes are 2^23 apart. Products are rounded to 24 bits, so 1 + 2^-24
  // becomes 1. Near 2^-127, for e = 0, they are rounded to multiples of 2^-149, so (1 + 2^-23) 2^-127 becomes 2^-127.
  template <Fp8Type kType>
  static MOE_HD uint32_t rounded_up(uint32_t amax_bits) {
    constexpr uint32_t kMaxAt0 = Fp8<kType>::kMaxBits - (127u << 23);  // FP8_MAX * 2^-127
    constexpr uint32_t kLargest = kMaxAt0 + ulps_above_max<kType>(1 + 1.0 / (1 << 24));
    constexpr uint32_t kLargestOf0 = kMaxAt0 + ulps_above_max<kType>(1 + 1.0 / (1 << 23));
    return amax_bits <= kLargestOf0 ? 0 : (amax_bits - kLargest + 0x7fffffu) >> 23;
  }
};

}  // namespace moe_fp8
