#include "activations/forward/add_bias.h"

#include "cpu/groups.h"
#include "cpu/parallel.h"
#include "numerics/dispatch.h"

namespace moe_fp8 {

void add_bias_cpu(const AddBiasParams& p) {
  if (p.N == 0) return;
  const std::vector<int> ends = safe_ends(p.bias.offs, p.bias.E, p.rows);
  dispatch_in(p.in, [&](auto in) {
    using In = decltype(in);
    using Bits = typename In::Bits;
    parallel(p.rows, p.rows * p.N, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t e = group_of(ends, r);
        const Bits* x = static_cast<const Bits*>(p.x) + r * p.x_stride;
        const Bits* bias = e < p.bias.E ? static_cast<const Bits*>(p.bias.values) + e * p.N : nullptr;
        Bits* out = static_cast<Bits*>(p.out) + r * p.N;
        for (int64_t n = 0; n < p.N; ++n)
          out[n] = In::from_float(In::to_float(x[n]) + (bias ? In::to_float(bias[n]) : 0.f));
      }
    });
  });
}

}  // namespace moe_fp8
