// Dequantizing on the CPU, of a whole operand and of rows for scaled_grouped_mm.
#pragma once
#include <array>
#include <vector>

#include "numerics/operand_scales.h"
#include "scales/dequantize.h"

namespace moe_fp8 {

struct Segment {  // columns under one scale of each row
  int64_t begin, end;
  ColumnBlock block;
};
// Adds those of a group: its columns and the number of its first block.
inline void add_segments(std::vector<Segment>& to, const OperandScales& scales, int64_t begin, int64_t end, int first) {
  const int64_t step = scales.block_size ? scales.block_size : end - begin;
  for (int64_t k = begin; k < end; k += step)
    to.push_back({k, k + step < end ? k + step : end, scales.block(first, int(end - begin), int(k - begin))});
}

// The values of all bytes of an fp8 type.
std::array<float, 256> decoded(Fp8Type type);

// Row `row` of group `group` as the scales count them; without scales, decoded alone.
template <class Out>
void dequantize_row(const std::array<float, 256>& values, const OperandScales& scales, int64_t group, int64_t row,
                    const std::vector<Segment>& segments, const uint8_t* q, typename Out::Bits* out) {
  for (const Segment& s : segments) {
    const float scale = scales.data ? scales.at(group, row, s.block) : 1.f;
    for (int64_t k = s.begin; k < s.end; ++k) out[k] = Out::from_float(values[q[k]] * scale);
  }
}

void dequantize_cpu(const DequantizeParams& p);

}  // namespace moe_fp8
