#include "low_rank/tokens.h"

#include "cpu/dequantize.h"
#include "cpu/groups.h"
#include "cpu/parallel.h"
#include "numerics/floats.h"

namespace moe_fp8 {
namespace {

constexpr int kLanes = 16;           // sums of a dot product that run side by side, in vectors of the CPU
constexpr int64_t kColumns = 512;    // of a part of an outer product: its sums stay in the cache

void to_floats(const uint16_t* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = BF16::to_float(from[i]);
}

// Reads rows of x. values: of the bytes of its type.
struct RowReader {
  explicit RowReader(const TokenRows& x) : x(x), values(x.is_fp8 ? decoded(x.type) : std::array<float, 256>{}) {}
  void operator()(int64_t token, int64_t column, int64_t n, float* to) const {
    if (!x.is_fp8) return to_floats(x.bfloat16(token) + column, n, to);
    const uint8_t* q = x.fp8(token) + column;
    for (int64_t i = 0; i < n; ++i) {
      const float scale = x.scales(token)[x.scale_at(column + i)];
      to[i] = BF16::to_float(BF16::from_float(values[q[i]] * scale));
    }
  }
  const TokenRows& x;
  std::array<float, 256> values;
};

// The sum of a[i] * b[i]. Lane i sums every 16th product. n is a multiple of kLanes.
float dot(const float* a, const float* b, int64_t n) {
  float lanes[kLanes] = {};
  for (int64_t first = 0; first < n; first += kLanes)
    for (int i = 0; i < kLanes; ++i) lanes[i] += a[first + i] * b[first + i];
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

}  // namespace

void narrow_tokens_cpu(const NarrowTokensParams& p) {
  if (p.P == 0 || p.R == 0) return;
  const std::vector<int> ends = safe_ends(p.offs, p.E, p.P);
  const RowReader read(p.x);
  const int64_t width = round_up<int64_t>(p.W, kLanes);  // behind W, floats are zero
  parallel(p.P, p.P * p.R * std::max<int64_t>(p.W / kLanes, 1), [&](int64_t begin, int64_t end) {
    std::vector<float> x(width), m;
    int64_t e = group_of(ends, begin), expert = -1;
    for (int64_t row = begin; row < end; ++row) {
      while (e < p.E && row >= ends[e]) ++e;
      uint16_t* out = p.out + row * p.R;
      const int64_t token = e < p.E ? source_row(p.source, row) : -1;
      if (token < 0) {
        std::fill_n(out, p.R, uint16_t(0));
        continue;
      }
      if (expert != e) {
        m.resize(p.R * width);
        for (int64_t r = 0; r < p.R; ++r)
          to_floats(p.m + e * p.m_expert_stride + r * p.m_stride, p.W, m.data() + r * width);
        expert = e;
      }
      read(token, 0, p.W, x.data());
      for (int64_t r = 0; r < p.R; ++r) out[r] = BF16::from_float(dot(x.data(), m.data() + r * width, width));
    }
  });
}

void outer_tokens_cpu(const OuterTokensParams& p) {
  if (p.E == 0 || p.R == 0 || p.W == 0) return;
  const std::vector<int> ends = safe_ends(p.offs, p.E, p.P);
  const RowReader read(p.x);
  const int64_t parts = ceil_div(p.W, kColumns);
  parallel(p.E * parts, (p.P + p.E) * p.R * p.W / kLanes, [&](int64_t begin, int64_t end) {
    std::vector<float> x(kColumns), sums(p.R * kColumns);
    for (int64_t at = begin; at < end; ++at) {
      const int64_t e = at / parts, column = at % parts * kColumns, n = std::min(kColumns, p.W - column);
      std::fill(sums.begin(), sums.end(), 0.f);
      for (int64_t row = e > 0 ? ends[e - 1] : 0; row < ends[e]; ++row) {
        const int64_t token = source_row(p.source, row);
        if (token < 0) continue;
        read(token, column, n, x.data());
        const float score = p.score(row);
        for (int64_t r = 0; r < p.R; ++r) {
          float u = BF16::to_float(p.u[row * p.u_stride + r]);
          if (p.scores) u = BF16::to_float(BF16::from_float(score * u));
          float* sum = sums.data() + r * kColumns;
          for (int64_t i = 0; i < n; ++i) sum[i] += u * x[i];
        }
      }
      for (int64_t r = 0; r < p.R; ++r) {
        const int64_t first = (e * p.R + r) * p.W + column;
        const float* sum = sums.data() + r * kColumns;
        if (p.is_float32) {
          for (int64_t i = 0; i < n; ++i) static_cast<float*>(p.out)[first + i] = as_float(F32::from_float(sum[i]));
        } else {
          for (int64_t i = 0; i < n; ++i) static_cast<uint16_t*>(p.out)[first + i] = BF16::from_float(sum[i]);
        }
      }
    }
  });
}

}  // namespace moe_fp8
