// Dequantizing on the CPU, for the op and for scaled_grouped_mm.
#pragma once
#include "numerics/operand_scales.h"
#include "ops/common.h"
#include "ops/cpu_loops.h"

namespace moe_fp8 {

struct Segment {  // columns under one scale of each row
  int64_t begin, end;
  ColumnBlock block;
};
// Adds those of a group: its columns and the number of its first block.
inline void add_segments(std::vector<Segment>& to, const OperandScales& scales, int64_t begin, int64_t end, int first) {
  const int64_t step = scales.block_size ? scales.block_size : end - begin;
  for (int64_t k = begin; k < end; k += step)
    to.push_back({k, std::min(end, k + step), scales.block(first, int(end - begin), int(k - begin))});
}

inline std::array<float, 256> decoded(Fp8Type type) {
  std::array<float, 256> values;
  dispatch_fp8<F32>(type, [&](auto, auto tag) {
    for (int i = 0; i < 256; ++i) values[i] = fp8_to_float<decltype(tag)::value>(uint8_t(i));
    return 0;
  });
  return values;
}

// Row `row` of group `group` as the scales count them; without scales, decoded alone.
template <class Out>
void dequantize_row(const std::array<float, 256>& values, const OperandScales& scales, int64_t group, int64_t row,
                    const std::vector<Segment>& segments, const uint8_t* q, typename Out::Bits* out) {
  for (const Segment& s : segments) {
    const float scale = scales.data ? scales.at(group, row, s.block) : 1.f;
    if (scales.layout != ScaleLayout::kFloat)
      for (int64_t k = s.begin; k < s.end; ++k) out[k] = Out::from_float(times_e8m0(values[q[k]], scale));
    else
      for (int64_t k = s.begin; k < s.end; ++k) out[k] = Out::from_float(values[q[k]] * scale);
  }
}

}  // namespace moe_fp8
