#include "cpu/dequantize.h"

#include <cstring>

#include "cpu/groups.h"
#include "cpu/parallel.h"
#include "numerics/dispatch.h"

namespace moe_fp8 {
namespace {

template <class Out>
void dequantize(const DequantizeParams& p) {
  const bool m_grouped = p.groups == Groups::kRows, k_grouped = p.groups == Groups::kColumns;
  const bool groups_begin_blocks = k_grouped && p.scale.layout != ScaleLayout::kE8M0;
  const std::vector<int> ends = safe_ends(p.offs, p.num_groups, m_grouped ? p.rows : p.K);
  std::vector<int64_t> starts, scale_starts;  // of each group: its first row or column, and its first among the scales
  std::vector<Segment> segments;
  int64_t start = 0, scale_start = 0;
  for (size_t g = 0; g < ends.size(); start = ends[g++]) {
    starts.push_back(start);
    scale_starts.push_back(scale_start);
    if (groups_begin_blocks)
      add_segments(segments, p.scale, start, ends[g], int(p.scale.block_size ? scale_start / p.scale.block_size : g));
    scale_start += round_up<int64_t>(ends[g] - start, kGroupScales);
  }
  const int64_t grouped_columns = k_grouped ? start : p.K;  // columns behind the last group become zeros
  if (!groups_begin_blocks) add_segments(segments, p.scale, 0, grouped_columns, 0);
  const std::array<float, 256> values = decoded(p.type);
  parallel(p.E * p.rows, p.E * p.rows * p.K, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t e = i / p.rows, row = i % p.rows;
      int64_t scale_row = row, columns = grouped_columns;
      if (m_grouped) {
        const int64_t g = group_of(ends, row);
        if (g == p.num_groups) columns = 0;
        else scale_row = row - starts[g] + scale_starts[g];
      }
      auto* out = static_cast<typename Out::Bits*>(p.out) + i * p.K;
      const uint8_t* q = p.q + e * p.group_stride + row * p.row_stride;
      if (columns) dequantize_row<Out>(values, p.scale, e, scale_row, segments, q, out);
      std::memset(out + columns, 0, (p.K - columns) * sizeof *out);
    }
  });
}

}  // namespace

std::array<float, 256> decoded(Fp8Type type) {
  std::array<float, 256> values;
  dispatch_fp8(type, [&](auto constant) {
    for (int i = 0; i < 256; ++i) values[i] = fp8_to_float<decltype(constant)::value>(uint8_t(i));
  });
  return values;
}

void dequantize_cpu(const DequantizeParams& p) {
  if (p.E * p.rows == 0 || p.K == 0) return;
  dispatch_in(p.out_type, [&](auto out) { dequantize<decltype(out)>(p); });
}

}  // namespace moe_fp8
