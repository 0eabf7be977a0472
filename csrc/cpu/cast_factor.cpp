#include "low_rank/cast_factor.h"

#include "cpu/parallel.h"
#include "numerics/dispatch.h"

namespace moe_fp8 {
namespace {

template <class In, class Out>
void cast(const CastFactorParams& p) {
  const FactorDim &x = p.dims[0], &y = p.dims[1], &z = p.dims[2];
  parallel(y.size * z.size, x.size * y.size * z.size, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at_z = row / y.size, at_y = row % y.size;
      const int64_t given = at_y < y.given && at_z < z.given ? x.given : 0;
      const auto* m = static_cast<const typename In::Bits*>(p.m) + (given ? at_y * y.stride + at_z * z.stride : 0);
      auto* out = static_cast<typename Out::Bits*>(p.out) + row * x.size;
      for (int64_t i = 0; i < given; ++i) out[i] = Out::from_float(p.scaling * In::to_float(m[i * x.stride]));
      std::fill(out + given, out + x.size, typename Out::Bits(0));
    }
  });
}

}  // namespace

void cast_factor_cpu(const CastFactorParams& p) {
  for (const FactorDim& d : p.dims)
    if (d.size == 0) return;
  dispatch_in(p.in, [&](auto in) {
    dispatch_in(p.out_type, [&](auto out) { cast<decltype(in), decltype(out)>(p); });
  });
}

}  // namespace moe_fp8
