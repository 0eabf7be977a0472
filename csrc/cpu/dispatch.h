// The CPU's loops are compiled for every pair of types.
#pragma once
#include <type_traits>

#include "numerics/dispatch.h"

namespace moe_fp8 {

// f(constant of the type).
template <class F>
int dispatch_fp8(Fp8Type type, F f) {
  switch (type) {
    case Fp8Type::kE4M3FN: return f(std::integral_constant<Fp8Type, Fp8Type::kE4M3FN>{});
    case Fp8Type::kE5M2: return f(std::integral_constant<Fp8Type, Fp8Type::kE5M2>{});
    case Fp8Type::kE4M3FNUZ: return f(std::integral_constant<Fp8Type, Fp8Type::kE4M3FNUZ>{});
    default: return f(std::integral_constant<Fp8Type, Fp8Type::kE5M2FNUZ>{});
  }
}

}  // namespace moe_fp8
