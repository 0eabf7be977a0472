// Arithmetic that chips have instructions for: on a float, and on the two 16-bit halves of a word.
#pragma once
#include <cmath>
#include <cstdint>

#include "platform/compiler.h"

namespace moe_fp8 {

MOE_HD float magnitude(float x) { return fabsf(x); }
// clamp_max: the smaller of x and max; max if x is NaN. reciprocal: RN32(1 / d) for d in [1, 2]. CUDA's division takes
// the same steps, behind a branch for other exponents.
#if defined(__CUDA_ARCH__)
MOE_HD float clamp_max(float x, float max) { return fminf(x, max); }
MOE_HD float reciprocal(float d) {
  float approximate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(approximate) : "f"(d));
  return fmaf(approximate, fmaf(-d, approximate, 1.f), approximate);
}
#else
MOE_HD float clamp_max(float x, float max) { return x < max ? x : max; }
MOE_HD float reciprocal(float d) { return 1.f / d; }
#endif

#if defined(MOE_CUDA) || defined(MOE_HIP)

#if defined(MOE_CUDA)
MOE_DEVICE uint32_t max_u16x2(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
MOE_DEVICE uint32_t min_s16x2(uint32_t a, uint32_t b) { return __vmins2(a, b); }
#else
MOE_DEVICE uint32_t max_u16x2(uint32_t a, uint32_t b) {
  const uint32_t lo = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
  const uint32_t hi = (a >> 16) > (b >> 16) ? a >> 16 : b >> 16;
  return hi << 16 | lo;
}
MOE_DEVICE uint32_t min_s16x2(uint32_t a, uint32_t b) {
  const auto min = [](uint32_t a, uint32_t b) { return uint16_t(int16_t(a) < int16_t(b) ? a : b); };
  return uint32_t(min(a >> 16, b >> 16)) << 16 | min(a, b);
}
#endif
// max(|a|, |b|) of both halves, bfloat16 or float16; NaN is largest. The sign bits of the result are undefined.
template <bool kBF16>
MOE_DEVICE uint32_t max_magnitude_x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  uint32_t d;
  if constexpr (kBF16) asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return max_u16x2(a & 0x7fff7fffu, b & 0x7fff7fffu);
#endif
}

#endif  // MOE_CUDA || MOE_HIP

}  // namespace moe_fp8
