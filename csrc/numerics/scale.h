// Scale rules: from the amax of a scaling block to the multiplier of the cast and the stored scale.
#pragma once
#include "numerics/formats.h"

namespace moe_fp8 {

// Float scales:  multiplier = RN32(FP8_MAX / max(amax, 1e-12)), its mantissa cleared when pow2;
//                dequant    = RN32(1 / multiplier);  both NaN when the block holds a NaN or an Inf.
struct ScaleF32 {
  float multiplier;

  MOE_HD float dequant() const { return multiplier != multiplier ? multiplier : 1.f / multiplier; }

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

}  // namespace moe_fp8
