#include "cpu/dequantize.h"

#include <cstring>

#include "cpu/groups.h"
#include "cpu/parallel.h"
#include "cpu/dispatch.h"

namespace moe_fp8 {
namespace {

template <class Out>
void dequantize(const DequantizeParams& p) {
  const bool of_rows = p.groups == Groups::kRows, of_columns = p.groups == Groups::kColumns;
  const bool anew = of_columns && p.scale.layout != ScaleLayout::kE8M0;  // blocks, with every group
  const std::vector<int> ends = safe_ends(p.offs, p.num_groups, of_rows ? p.rows : p.K);
  std::vector<int64_t> starts, scale_starts;  // of groups
  std::vector<Segment> segments;
  int64_t start = 0, at = 0;
  for (size_t g = 0; g < ends.size(); start = ends[g++]) {
    starts.push_back(start);
    scale_starts.push_back(at);
    if (anew)
      add_segments(segments, p.scale, start, ends[g], int(p.scale.block_size ? at / p.scale.block_size : g));
    at += round_up<int64_t>(ends[g] - start, kGroupScales);
  }
  const int64_t live_columns = of_columns ? start : p.K;
  if (!anew) add_segments(segments, p.scale, 0, live_columns, 0);
  const std::array<float, 256> values = decoded(p.type);
  parallel(p.E * p.rows, p.E * p.rows * p.K, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t e = i / p.rows, row = i % p.rows;
      int64_t scale_row = row, columns = live_columns;
      if (of_rows) {
        const size_t g = std::upper_bound(ends.begin(), ends.end(), row) - ends.begin();
        if (g == ends.size()) columns = 0;
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
    return 0;
  });
  return values;
}

void dequantize_cpu(const DequantizeParams& p) {
  if (p.E * p.rows == 0 || p.K == 0) return;
  dispatch_in(p.out_type, [&](auto out) { return dequantize<decltype(out)>(p), 0; });
}

}  // namespace moe_fp8
