// Elementwise steps of a quantizing kernel: maxima of magnitudes, and casts to fp8.
#pragma once
#include "numerics/scale.h"
#include "platform/arithmetic.h"
#include "platform/convert.h"
#include "primitives/row_reduce.h"

namespace moe_fp8 {

// The larger magnitude of two words, where NaN > Inf > finite. A word holds one float32 or two 16-bit inputs, which are
// compared separately. The sign bits of the result are undefined.
template <class In>
MOE_DEVICE uint32_t max_magnitude(uint32_t a, uint32_t b) {
  if constexpr (kPerWord<In> == 2) return max_magnitude_x2<std::is_same_v<In, BF16>>(a, b);
  const uint32_t x = a & 0x7fffffffu, y = b & 0x7fffffffu;
  return x > y ? x : y;
}
template <class In>
struct MaxMagnitude {
  MOE_DEVICE uint32_t operator()(uint32_t a, uint32_t b) const { return max_magnitude<In>(a, b); }
};
// The float32 bits of magnitude i in a word of such maxima.
template <class In>
MOE_DEVICE uint32_t magnitude_bits(uint32_t word, int i) { return as_bits(element<In>(word, i)) & 0x7fffffffu; }
// The float32 bits of the largest magnitude in it.
template <class In>
MOE_DEVICE uint32_t amax_bits(uint32_t word) {
  const uint32_t lo = magnitude_bits<In>(word, 0), hi = magnitude_bits<In>(word, kPerWord<In> - 1);
  return lo > hi ? lo : hi;
}
// Reduces two words of such maxima to one: {max of a's halves, max of b's halves}.
template <class In>
MOE_DEVICE uint32_t max_within(uint32_t a, uint32_t b) {
  static_assert(kPerWord<In> == 2);
  return max_magnitude<In>(low_halves(a, b), high_halves(a, b));
}

// Returns the float32 bits of the largest magnitude of row lane * kRows / kLanes, over kLanes neighbouring lanes. Each
// lane brings a word of magnitudes for each of kRows rows, a power of two of at most kLanes.
template <class In, int kLanes, int kRows>
MOE_DEVICE uint32_t amax_of_rows(const uint32_t (&rows)[kRows], int lane) {
  if constexpr (kPerWord<In> == 1) {
    return magnitude_bits<In>(reduce_scatter_lanes<kLanes>(rows, lane, MaxMagnitude<In>{}), 0);
  } else {
    uint32_t two_rows[kRows / 2];
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) two_rows[i] = max_within<In>(rows[2 * i], rows[2 * i + 1]);
    const uint32_t word = reduce_scatter_lanes<kLanes>(two_rows, lane, MaxMagnitude<In>{});
    return magnitude_bits<In>(word, lane * kRows / kLanes % 2);
  }
}

// The larger of amax and |x|, ignoring an x that is not finite: 0 * x is then NaN, which fmaxf leaves out.
MOE_DEVICE float max_finite(float amax, float x) { return fmaxf(amax, fmaf(x, 0.f, magnitude(x))); }
// y, or NaN if x is not finite.
MOE_DEVICE float nan_unless_finite(float y, float x) { return fmaf(x, 0.f, y); }

inline constexpr bool kCastsInHardware = kHardwareFp8 != HardwareFp8::kNone;

// Casts four floats to four fp8 bytes; a becomes byte 0. This one takes any format, in software.
MOE_DEVICE uint32_t cast4(const Fp8Values& type, float a, float b, float c, float d) {
  return fp8_from_float(type, a) | uint32_t(fp8_from_float(type, b)) << 8 | uint32_t(fp8_from_float(type, c)) << 16 |
         uint32_t(fp8_from_float(type, d)) << 24;
}
// The native formats, whose casts are instructions: FNUZ on gfx942, FN elsewhere. On chips without such instructions FN
// counts as native, and casts are software.
inline constexpr Fp8Type kNativeE4M3 = kHardwareFp8 == HardwareFp8::kFNUZ ? Fp8Type::kE4M3FNUZ : Fp8Type::kE4M3FN;
inline constexpr Fp8Type kNativeE5M2 = kHardwareFp8 == HardwareFp8::kFNUZ ? Fp8Type::kE5M2FNUZ : Fp8Type::kE5M2;
template <Fp8Type kOut>
MOE_DEVICE uint32_t cast4(float a, float b, float c, float d) {
  if constexpr (kCastsInHardware) return convert_fp8x4<is_e5m2(kOut)>(a, b, c, d);
  return cast4(Fp8Values::of<kOut>(), a, b, c, d);
}

}  // namespace moe_fp8
