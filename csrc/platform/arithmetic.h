// Arithmetic that chips have instructions for: of a float, and of the two halves of a word.
#pragma once
#include <cmath>
#include <cstdint>

#include "platform/compiler.h"

namespace moe_fp8 {

MOE_HD float magnitude(float x) { return fabsf(x); }
// The smaller one; b where a is NaN.
MOE_HD float least(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fminf(a, b);
#else
  return a < b ? a : b;
#endif
}
// RN32(1 / d) of a d from 1 to 2. CUDA's own division takes these steps too, behind a branch for other exponents.
MOE_HD float reciprocal(float d) {
#if defined(__CUDA_ARCH__)
  float near;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(d));
  return fmaf(near, fmaf(-d, near, 1.f), near);
#else
  return 1.f / d;
#endif
}

#if defined(MOE_CUDA) || defined(MOE_HIP)

MOE_DEVICE uint32_t max_u16x2(uint32_t a, uint32_t b) {
#if defined(MOE_CUDA)
  return __vmaxu2(a, b);
#else
  const uint32_t lo = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
  const uint32_t hi = (a >> 16) > (b >> 16) ? a >> 16 : b >> 16;
  return hi << 16 | lo;
#endif
}
MOE_DEVICE uint32_t min_s16x2(uint32_t a, uint32_t b) {
#if defined(MOE_CUDA)
  return __vmins2(a, b);
#else
  const auto least = [](uint32_t a, uint32_t b) { return uint16_t(int16_t(a) < int16_t(b) ? a : b); };
  return uint32_t(least(a >> 16, b >> 16)) << 16 | least(a, b);
#endif
}
// max(|a|, |b|) of two halves, NaN largest. The sign bits of the result mean nothing.
MOE_DEVICE uint32_t max_magnitude_bf16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  uint32_t d;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return max_u16x2(a & 0x7fff7fffu, b & 0x7fff7fffu);
#endif
}
MOE_DEVICE uint32_t max_magnitude_f16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  uint32_t d;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return max_u16x2(a & 0x7fff7fffu, b & 0x7fff7fffu);
#endif
}

#endif  // MOE_CUDA || MOE_HIP

}  // namespace moe_fp8
