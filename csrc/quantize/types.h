// The types that quantizing kernels are instantiated for.
//
// Vectorized: one type of x, the fp8 formats that the chip casts to, 16-byte vectors of x and of the outputs.
// Generic: everything else. Types are run-time values, and elements are handled one by one in float32.
#pragma once
#include "primitives/cast.h"
#include "primitives/elements.h"
#include "quantize/quantize.h"

namespace moe_fp8 {

// The one of the chip's two fp8 formats that a kernel casts to. kRuntime decides at run time, outside of loops: it
// halves the number of instances where registers allow it.
enum class Fp8Variant { kE4M3, kE5M2, kRuntime };

// Whether p asks for the second of the two roundings that scales of this type know.
template <class Scale>
MOE_DEVICE bool rounds_second(const QuantizeParams& p) {
  return p.rounding == second_rounding(std::is_same_v<Scale, ScaleF32> ? ScaleType::kF32 : ScaleType::kE8M0);
}

template <class In_, Fp8Variant kVariant_>
struct Vectorized {
  static constexpr Fp8Variant kVariant = kVariant_;
  using In = In_;                                // type of words in registers
  using Bits = typename In::Bits;                // type of x in memory
  static constexpr bool kVectorized = true, kStaticVariant = kVariant != Fp8Variant::kRuntime;
  static constexpr int kVec = 4 * kPerWord<In>;  // elements of 16 bytes of words

  static MOE_DEVICE const Bits* advance(const QuantizeParams&, const Bits* x, int64_t elements) { return x + elements; }
  static MOE_DEVICE bool to_e5m2(const QuantizeParams& p) {
    return kVariant == Fp8Variant::kRuntime ? is_e5m2(p.out) : kVariant == Fp8Variant::kE5M2;
  }
  // Returns f(cast), where cast(a, b, c, d) packs four floats into four fp8 bytes. This hoists the branch on E4M3 or
  // E5M2 out of loops.
  template <class F>
  static MOE_DEVICE auto with_cast(const QuantizeParams& p, F f) {
    if (to_e5m2(p)) return f([](float a, float b, float c, float d) { return cast4<kNativeE5M2>(a, b, c, d); });
    return f([](float a, float b, float c, float d) { return cast4<kNativeE4M3>(a, b, c, d); });
  }
  template <class Scale>
  static MOE_DEVICE Scale scale_of(const QuantizeParams& p, uint32_t amax_bits) {
    const bool second = rounds_second<Scale>(p);
    return to_e5m2(p) ? Scale::template from_amax<kNativeE5M2>(amax_bits, second)
                      : Scale::template from_amax<kNativeE4M3>(amax_bits, second);
  }
};

struct Generic {
  using In = F32;
  using Bits = uint8_t;
  static constexpr bool kVectorized = false, kStaticVariant = false;
  static constexpr int kVec = 4;

  static MOE_DEVICE const Bits* advance(const QuantizeParams& p, const Bits* x, int64_t elements) {
    return x + bytes_of(p.in) * elements;
  }
  // The float32 bits of element i, counted from x.
  static MOE_DEVICE uint32_t element_bits(const QuantizeParams& p, const Bits* x, int i) {
    return as_bits(to_float(p.in, load_bits(x, p.in, i)));
  }
  template <class F>
  static MOE_DEVICE auto with_cast(const QuantizeParams& p, F f) {
    return f([&](float a, float b, float c, float d) { return cast4(Fp8Values::of(p.out), a, b, c, d); });
  }
  template <class Scale>
  static MOE_DEVICE Scale scale_of(const QuantizeParams& p, uint32_t amax_bits) {
    const bool second = rounds_second<Scale>(p);
    switch (p.out) {
      case Fp8Type::kE4M3FN: return Scale::template from_amax<Fp8Type::kE4M3FN>(amax_bits, second);
      case Fp8Type::kE5M2: return Scale::template from_amax<Fp8Type::kE5M2>(amax_bits, second);
      case Fp8Type::kE4M3FNUZ: return Scale::template from_amax<Fp8Type::kE4M3FNUZ>(amax_bits, second);
      default: return Scale::template from_amax<Fp8Type::kE5M2FNUZ>(amax_bits, second);
    }
  }
};

template <class T>
struct TypeOf { using Type = T; };

// The types of a kernel that serves both fp8 formats; Generic stays Generic.
template <class In>
using TypesOf = std::conditional_t<std::is_same_v<In, Generic>, Generic, Vectorized<In, Fp8Variant::kRuntime>>;

// Calls f with the types of a kernel. bfloat16 gets an instance for each fp8 format, because a loop that serves both is
// longer. Other inputs are rare and get one.
template <class In, class F>
int dispatch_types(const QuantizeParams& p, F f) {
  if constexpr (!std::is_same_v<In, BF16>) return f(TypesOf<In>{});
  else return is_e5m2(p.out) ? f(Vectorized<In, Fp8Variant::kE5M2>{}) : f(Vectorized<In, Fp8Variant::kE4M3>{});
}

// Casts four neighbouring elements, each times its multiplier. `words` holds 4 / kPerWord words.
template <class In, class Cast>
MOE_DEVICE uint32_t cast_words(const uint32_t* words, float m0, float m1, float m2, float m3, Cast cast) {
  constexpr int n = kPerWord<In>;
  return cast(element<In>(words[0], 0) * m0, element<In>(words[1 / n], 1 % n) * m1,
              element<In>(words[2 / n], 2 % n) * m2, element<In>(words[3 / n], 3 % n) * m3);
}

}  // namespace moe_fp8
