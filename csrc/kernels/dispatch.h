// From the run-time types of a call to the compile-time types of a kernel.
#pragma once
#include "numerics/formats.h"

namespace moe_fp8 {

template <Fp8Type kValue>
struct Fp8Tag { static constexpr Fp8Type value = kValue; };

// f(In{}, Fp8Tag<out>{}) for the types named at run time.
template <class In, class F>
int dispatch_fp8(Fp8Type out, F f) {
  switch (out) {
    case Fp8Type::kE4M3FN: return f(In{}, Fp8Tag<Fp8Type::kE4M3FN>{});
    case Fp8Type::kE5M2: return f(In{}, Fp8Tag<Fp8Type::kE5M2>{});
    case Fp8Type::kE4M3FNUZ: return f(In{}, Fp8Tag<Fp8Type::kE4M3FNUZ>{});
    default: return f(In{}, Fp8Tag<Fp8Type::kE5M2FNUZ>{});
  }
}
template <class F>
int dispatch_in(InType in, F f) {
  switch (in) {
    case InType::kBF16: return f(BF16{});
    case InType::kF16: return f(F16{});
    default: return f(F32{});
  }
}
template <class F>
int dispatch(InType in, Fp8Type out, F f) {
  return dispatch_in(in, [&](auto in_tag) { return dispatch_fp8<decltype(in_tag)>(out, f); });
}

}  // namespace moe_fp8
