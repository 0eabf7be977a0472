// Arithmetic of the two halves of a word.
#pragma once
#include <cstdint>

#include "platform/compiler.h"

namespace moe_fp8 {

MOE_DEVICE uint32_t max_u16x2(uint32_t a, uint32_t b) {
#if defined(MOE_CUDA)
  return __vmaxu2(a, b);
#else
  const uint32_t lo = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
  const uint32_t hi = (a >> 16) > (b >> 16) ? a >> 16 : b >> 16;
  return hi << 16 | lo;
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

}  // namespace moe_fp8
