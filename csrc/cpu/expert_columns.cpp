#include "tokens/expert_columns.h"

#include <cstring>

#include "cpu/groups.h"
#include "cpu/parallel.h"
#include "numerics/dispatch.h"

namespace moe_fp8 {
namespace {

// The group of a row, or E if it has none.
int64_t group_of(const std::vector<int>& ends, int64_t row) {
  return std::upper_bound(ends.begin(), ends.end(), int(row)) - ends.begin();
}

template <class In>
void spread(const SpreadExpertColumnsParams& p, const std::vector<int>& ends) {
  using Bits = typename In::Bits;
  const int64_t columns = p.E * p.R;
  parallel(p.T, p.T * columns, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(columns);
    for (int64_t t = begin; t < end; ++t) {
      std::fill(sum.begin(), sum.end(), 0.f);
      for (int64_t slot = t * p.top_k; slot < (t + 1) * p.top_k; ++slot) {
        const int64_t row = p.inverse[slot];
        if (row < 0 || row >= p.P) continue;
        const int64_t e = group_of(ends, row);
        if (e == p.E) continue;
        const Bits* y = static_cast<const Bits*>(p.y) + row * p.y_stride;
        const float score = p.scores ? p.scores[slot] : 1.f;
        for (int64_t r = 0; r < p.R; ++r) sum[e * p.R + r] += score * In::to_float(y[r]);
      }
      Bits* out = static_cast<Bits*>(p.out) + t * columns;
      for (int64_t c = 0; c < columns; ++c) out[c] = In::from_float(sum[c]);
    }
  });
}

}  // namespace

void take_expert_columns_cpu(const TakeExpertColumnsParams& p) {
  if (p.row_bytes == 0) return;
  const std::vector<int> ends = safe_ends(p.offs, p.E, p.P);
  parallel(p.P, p.P * p.row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t e = group_of(ends, i), row = e < p.E ? p.source.row(i) : -1;
      uint8_t* out = static_cast<uint8_t*>(p.out) + i * p.row_bytes;
      if (row < 0) std::memset(out, 0, p.row_bytes);
      else std::memcpy(out, static_cast<const uint8_t*>(p.x) + row * p.x_stride + e * p.row_bytes, p.row_bytes);
    }
  });
}

void spread_expert_columns_cpu(const SpreadExpertColumnsParams& p) {
  if (p.E * p.R == 0) return;
  const std::vector<int> ends = safe_ends(p.offs, p.E, p.P);
  dispatch_in(p.in, [&](auto in) { spread<decltype(in)>(p, ends); });
}

}  // namespace moe_fp8
