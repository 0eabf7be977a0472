#include "activations/backward/sum_groups.h"

#include "cpu/groups.h"
#include "cpu/parallel.h"
#include "numerics/dispatch.h"

namespace moe_fp8 {
namespace {

constexpr int64_t kColumns = 1024;  // of a part: its sums stay in the cache

// Sums kRows rows of n columns, from row `first` on, of which `rows` exist, into `out`. buffer: 3 * kColumns floats for
// each level.
template <class In, int kRows>
void sum_rows(const SumGroupsParams& p, int64_t first, int64_t rows, int64_t column, int64_t n, float* out,
              float* buffer) {
  if (rows <= 0) return void(std::fill_n(out, n, 0.f));
  if constexpr (kRows == 1) {
    const auto row = p.row(first);
    if (row.at < 0) return void(std::fill_n(out, n, 0.f));
    const auto* x = static_cast<const typename In::Bits*>(p.x) + row.at * p.x_stride + column;
    for (int64_t i = 0; i < n; ++i) out[i] = row.score * In::to_float(x[i]);
  } else {
    constexpr int kPart = kRows / 4;
    float* parts[] = {out, buffer, buffer + kColumns, buffer + 2 * kColumns};
    for (int i = 0; i < 4; ++i)
      sum_rows<In, kPart>(p, first + i * kPart, rows - i * kPart, column, n, parts[i], buffer + 3 * kColumns);
    for (int64_t i = 0; i < n; ++i) out[i] = (out[i] + parts[1][i]) + (parts[2][i] + parts[3][i]);
  }
}

template <class In>
void sum_groups(const SumGroupsParams& p) {
  const std::vector<int> ends = safe_ends(p.offs, p.E, p.rows);
  const int64_t parts = ceil_div(p.N, kColumns);
  parallel(p.E * parts, p.rows * p.N, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer((1 + 3 * 4) * kColumns);  // 4 levels: 256 is 4 to the 4th
    for (int64_t at = begin; at < end; ++at) {
      const int64_t e = at / parts, column = at % parts * kColumns, n = std::min(kColumns, p.N - column);
      const int64_t first = e > 0 ? ends[e - 1] : 0, rows = ends[e] - first;
      float *out = p.out + e * p.N + column, *sum = buffer.data();
      std::fill_n(out, n, 0.f);
      for (int64_t r = 0; r < rows; r += kRowsOfSum) {
        sum_rows<In, kRowsOfSum>(p, first + r, rows - r, column, n, sum, sum + kColumns);
        for (int64_t i = 0; i < n; ++i) out[i] += sum[i];
      }
      for (int64_t i = 0; i < n; ++i) out[i] = as_float(F32::from_float(out[i]));
    }
  });
}

}  // namespace

void sum_groups_cpu(const SumGroupsParams& p) {
  if (p.E == 0 || p.N == 0) return;
  dispatch_in(p.in, [&](auto in) { sum_groups<decltype(in)>(p); });
}

}  // namespace moe_fp8
