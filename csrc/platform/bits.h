// The bits of a float.
#pragma once
#include <cstdint>
#include <cstring>

#include "platform/compiler.h"

namespace moe_fp8 {

#if defined(__CUDA_ARCH__)
MOE_HD float as_float(uint32_t bits) { return __uint_as_float(bits); }
MOE_HD uint32_t as_bits(float f) { return __float_as_uint(f); }
#else
MOE_HD float as_float(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}
MOE_HD uint32_t as_bits(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return bits;
}
#endif

#if defined(MOE_CUDA) || defined(MOE_HIP)
// Bytes 0 to 3 are those in a, 4 to 7 those in b. Byte i of the result is the byte that hex digit i of `selector`
// names; digit 0 is the lowest.
MOE_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(MOE_CUDA)
  return __byte_perm(a, b, selector);
#else
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t bytes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) bytes |= uint32_t(both >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return bytes;
#endif
}
// Joins the low, or the high, halves of two words.
MOE_DEVICE uint32_t low_halves(uint32_t a, uint32_t b) { return (a & 0xffffu) | b << 16; }
MOE_DEVICE uint32_t high_halves(uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000u); }
#endif  // MOE_CUDA || MOE_HIP

}  // namespace moe_fp8
