// Conversion instructions, and constants that say which chips have them. Elsewhere numerics/ converts by arithmetic.
#pragma once
#include "platform/bits.h"

namespace moe_fp8 {

// A 16-bit float to float32: exact, subnormals included. Called only if kConvertsHalf.
#if defined(__CUDA_ARCH__)
constexpr bool kConvertsHalf = true;
MOE_DEVICE float half_to_float(uint32_t bits) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(uint16_t(bits)));
  return f;
}
#else
constexpr bool kConvertsHalf = false;
MOE_HD float half_to_float(uint32_t) { return 0; }
#endif

// Two floats to bfloat16, rounded to nearest even; `lo` is the low half. NaN becomes 0x7fff. Called only if
// kConvertsToBF16.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
constexpr bool kConvertsToBF16 = true;
MOE_DEVICE uint32_t to_bf16x2(float lo, float hi) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
#elif defined(SIMT_HOPPER)
constexpr bool kConvertsToBF16 = true;
#else
constexpr bool kConvertsToBF16 = false;
MOE_HD uint32_t to_bf16x2(float, float) { return 0; }
#endif

// The E8M0 byte of a positive float rounded up to a power of two. Called only if kConvertsE8M0.
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
constexpr bool kConvertsE8M0 = true;
MOE_DEVICE uint32_t e8m0_rounded_up(float f) {
  uint16_t pair;
  asm("cvt.rp.satfinite.ue8m0x2.f32 %0, 0f00000000, %1;" : "=h"(pair) : "f"(f));
  return pair & 0xffu;
}
#else
constexpr bool kConvertsE8M0 = false;
MOE_HD uint32_t e8m0_rounded_up(float) { return 0; }
#endif

#if defined(MOE_CUDA) || defined(MOE_HIP)

// ---- fp8 casts: round to nearest even, saturate, NaN becomes the format's canonical NaN ----------------------------
enum class HardwareFp8 { kNone, kFN, kFNUZ };
#if (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890) || \
    (defined(MOE_HIP) && (defined(__gfx950__) || defined(__gfx1201__)))
constexpr HardwareFp8 kHardwareFp8 = HardwareFp8::kFN;
#elif defined(MOE_HIP) && defined(__gfx942__)
constexpr HardwareFp8 kHardwareFp8 = HardwareFp8::kFNUZ;
#else
constexpr HardwareFp8 kHardwareFp8 = HardwareFp8::kNone;
#endif

#if defined(MOE_HIP)
// AMD's conversions neither saturate nor canonicalize NaN, and fmed3 alone would turn NaN into a number.
MOE_DEVICE float clamp_keep_nan(float v, float max) {
  return v != v ? as_float(0x7fc00000u) : __builtin_amdgcn_fmed3f(v, max, -max);
}
#endif
// Four floats to E5M2 or E4M3; byte 0 of the result is a.
template <bool kE5M2>
MOE_DEVICE uint32_t convert_fp8x4(float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t r;
#define MOE_CONVERT(type)                                                                  \
  asm("{.reg .b16 lo, hi;\n"                                                               \
      "cvt.rn.satfinite." type "x2.f32 lo, %2, %1;\n"                                      \
      "cvt.rn.satfinite." type "x2.f32 hi, %4, %3;\n"                                      \
      "mov.b32 %0, {lo, hi};}" : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d))
  if constexpr (kE5M2) MOE_CONVERT("e5m2");
  else MOE_CONVERT("e4m3");
#undef MOE_CONVERT
  return r;
#elif defined(MOE_HIP) && (defined(__gfx942__) || defined(__gfx950__) || defined(__gfx1201__))
  constexpr float kMax = kE5M2 ? 57344.f : kHardwareFp8 == HardwareFp8::kFNUZ ? 240.f : 448.f;
  a = clamp_keep_nan(a, kMax), b = clamp_keep_nan(b, kMax), c = clamp_keep_nan(c, kMax), d = clamp_keep_nan(d, kMax);
  if constexpr (kE5M2)
    return __builtin_amdgcn_cvt_pk_bf8_f32(c, d, __builtin_amdgcn_cvt_pk_bf8_f32(a, b, 0, false), true);
  else
    return __builtin_amdgcn_cvt_pk_fp8_f32(c, d, __builtin_amdgcn_cvt_pk_fp8_f32(a, b, 0, false), true);
#else
  return 0;  // never called: kHardwareFp8 is kNone
#endif
}

// Two fp8 bytes to two 16-bit floats, exact. kConvertsFp8ToHalf: by an instruction. kImplementsFp8ToHalf: by an
// instruction or by bit operations.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr bool kConvertsFp8ToHalf = true, kImplementsFp8ToHalf = true;
template <bool kE5M2>
MOE_DEVICE uint32_t fp8x2_to_f16x2(uint32_t pair) {
  uint32_t halves;
  if constexpr (kE5M2) asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(pair)));
  else asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(pair)));
  return halves;
}
#elif defined(MOE_CUDA)
constexpr bool kConvertsFp8ToHalf = false, kImplementsFp8ToHalf = true;
template <bool kE5M2>
MOE_DEVICE uint32_t fp8x2_to_f16x2(uint32_t pair) {
  const uint32_t spread = (pair & 0xffu) << 8 | (pair & 0xff00u) << 16;  // E5M2 is the upper byte of a 16-bit float
  if constexpr (kE5M2) return spread;
  // The shifted bits stand for 2^-8 of the value. The NaN 0x7f would become 480, so its bits are set separately.
  const uint32_t magnitude = spread & 0x7f007f00u, nan = (magnitude + 0x01000100u & 0x80008000u) >> 2;
  uint32_t halves = (spread & 0x80008000u) | magnitude >> 1;
#if defined(__CUDA_ARCH__)
  asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(halves) : "r"(0x5c005c00u));
#endif
  return halves | nan;
}
#else
constexpr bool kConvertsFp8ToHalf = false, kImplementsFp8ToHalf = false;
template <bool kE5M2>
MOE_DEVICE uint32_t fp8x2_to_f16x2(uint32_t) { return 0; }
#endif

// Four fp8 bytes of a word. The instruction takes either half of a register, so the upper pair needs no shift.
template <bool kE5M2>
MOE_DEVICE void fp8x4_to_f16x4(uint32_t word, uint32_t (&halves)[2]) {
#if defined(MOE_CUDA)
  uint16_t lo, hi;
  asm("mov.b32 {%0, %1}, %2;" : "=h"(lo), "=h"(hi) : "r"(word));
  halves[0] = fp8x2_to_f16x2<kE5M2>(lo);
  halves[1] = fp8x2_to_f16x2<kE5M2>(hi);
#endif
}

#endif  // MOE_CUDA || MOE_HIP

}  // namespace moe_fp8
