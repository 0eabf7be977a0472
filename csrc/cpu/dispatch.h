// Dispatch to CPU loops, which are compiled for every pair of input and fp8 type.
#pragma once
#include <type_traits>

#include "numerics/dispatch.h"

namespace moe_fp8 {

// Returns f(constant of the fp8 type).
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
