// Calls generic code with the type that a run-time value names.
#pragma once
#include <type_traits>

#include "numerics/floats.h"

namespace moe_fp8 {

// Returns f(In{}) for the type of inputs.
template <class F>
auto dispatch_in(InType in, F f) {
  switch (in) {
    case InType::kBF16: return f(BF16{});
    case InType::kF16: return f(F16{});
    default: return f(F32{});
  }
}

// Returns f(constant of the fp8 type).
template <class F>
auto dispatch_fp8(Fp8Type type, F f) {
  switch (type) {
    case Fp8Type::kE4M3FN: return f(std::integral_constant<Fp8Type, Fp8Type::kE4M3FN>{});
    case Fp8Type::kE5M2: return f(std::integral_constant<Fp8Type, Fp8Type::kE5M2>{});
    case Fp8Type::kE4M3FNUZ: return f(std::integral_constant<Fp8Type, Fp8Type::kE4M3FNUZ>{});
    default: return f(std::integral_constant<Fp8Type, Fp8Type::kE5M2FNUZ>{});
  }
}

}  // namespace moe_fp8
