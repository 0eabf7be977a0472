// Access width: how much of a row a thread reads or writes at a time. VectorAccess takes 16 bytes, ElementAccess one
// element of a type that is known at run time. Raw: a thread's bits as loaded. `at` counts elements.
#pragma once
#include "primitives/elements.h"

namespace moe_fp8 {

template <class In>
struct VectorAccess {
  using Raw = Vec16;
  static constexpr int kElements = 16 / sizeof(typename In::Bits);
  explicit MOE_HD VectorAccess(InType) {}

  static MOE_DEVICE void* address(const void* p, int64_t at) {
    return static_cast<typename In::Bits*>(const_cast<void*>(p)) + at;
  }
  static MOE_DEVICE Vec16* vec(const void* p, int64_t at) { return static_cast<Vec16*>(address(p, at)); }
  MOE_DEVICE Vec16 load(const void* from, int64_t at) const { return *vec(from, at); }
  MOE_DEVICE Vec16 load_once(const void* from, int64_t at) const { return load_stream(vec(from, at)); }
  MOE_DEVICE float element(const Vec16& v, int i) const {
    return moe_fp8::element<In>(v.w[i / kPerWord<In>], i % kPerWord<In>);
  }
  static MOE_DEVICE Vec16 packed_vec(const float* f) {
    Vec16 v;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kElements == 4) v.w[i] = In::from_float(f[i]);
      else v.w[i] = packed<In>(f[2 * i], f[2 * i + 1]);
    }
    return v;
  }
  MOE_DEVICE void store(void* to, int64_t at, const float* f) const { store_stream(vec(to, at), packed_vec(f)); }
};

struct ElementAccess {
  using Raw = uint32_t;
  static constexpr int kElements = 1;
  InType type;
  explicit MOE_HD ElementAccess(InType type) : type(type) {}

  MOE_DEVICE void* address(const void* p, int64_t at) const {
    return static_cast<uint8_t*>(const_cast<void*>(p)) + at * bytes_of(type);
  }
  MOE_DEVICE uint32_t load(const void* from, int64_t at) const { return load_bits(from, type, at); }
  MOE_DEVICE uint32_t load_once(const void* from, int64_t at) const { return load_bits(from, type, at); }
  MOE_DEVICE float element(uint32_t bits, int) const { return to_float(type, bits); }
  MOE_DEVICE void store(void* to, int64_t at, const float* f) const { store_element(to, type, at, *f); }
};

}  // namespace moe_fp8
