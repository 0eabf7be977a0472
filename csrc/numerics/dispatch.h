// Calls generic code with the type that a run-time value names.
#pragma once
#include "numerics/floats.h"

namespace moe_fp8 {

// Returns f(In{}) for the type of inputs.
template <class F>
int dispatch_in(InType in, F f) {
  switch (in) {
    case InType::kBF16: return f(BF16{});
    case InType::kF16: return f(F16{});
    default: return f(F32{});
  }
}

}  // namespace moe_fp8
