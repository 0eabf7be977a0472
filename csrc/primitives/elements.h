// Single elements of a type that is known at run time.
#pragma once
#include "numerics/floats.h"
#include "platform/arithmetic.h"
#include "platform/memory.h"

namespace moe_fp8 {

// Loads the bits as stored. Conversion comes later, so that many loads can be in flight.
MOE_DEVICE uint32_t load_bits(const void* from, InType type, int64_t at) {
  if (type == InType::kF32) return load_stream(static_cast<const uint32_t*>(from) + at);
  return load_stream(static_cast<const uint16_t*>(from) + at);
}
MOE_DEVICE float to_float(InType type, uint32_t bits) {
  switch (type) {
    case InType::kBF16: return BF16::to_float(bits);
    case InType::kF16: return F16::to_float(bits);
    default: return F32::to_float(bits);
  }
}
MOE_DEVICE void store_element(void* to, InType type, int64_t at, float f) {
  switch (type) {
    case InType::kBF16: return store_stream(static_cast<uint16_t*>(to) + at, BF16::from_float(f));
    case InType::kF16: return store_stream(static_cast<uint16_t*>(to) + at, F16::from_float(f));
    default: return store_stream(static_cast<uint32_t*>(to) + at, F32::from_float(f));
  }
}
// Two floats as a word of bfloat16, for values that are never stored: a NaN may get any NaN bits.
MOE_DEVICE uint32_t packed_bf16(float lo, float hi) {
  if constexpr (kConvertsToBF16) return to_bf16x2(lo, hi);
  return BF16::from_float(lo) | uint32_t(BF16::from_float(hi)) << 16;
}
// Two floats as a word of a 16-bit type, as from_float() converts them.
template <class Out>
MOE_DEVICE uint32_t packed(float lo, float hi) {
  if constexpr (std::is_same_v<Out, BF16> && kConvertsToBF16)
    return min_s16x2(to_bf16x2(lo, hi), 0x7fc07fc0u);  // turns the instruction's NaN, 0x7fff, into 0x7fc0
  return Out::from_float(lo) | uint32_t(Out::from_float(hi)) << 16;
}

}  // namespace moe_fp8
