// From types named at run time to types.
#pragma once
#include "numerics/floats.h"

namespace moe_fp8 {

// f(In{}).
template <class F>
int dispatch_in(InType in, F f) {
  switch (in) {
    case InType::kBF16: return f(BF16{});
    case InType::kF16: return f(F16{});
    default: return f(F32{});
  }
}

}  // namespace moe_fp8
