// Dequantization of single rows on the CPU, for whole operands, scaled_grouped_mm and activations.
#pragma once
#include <array>
#include <vector>

#include "numerics/operand_scales.h"
#include "scales/dequantize.h"

namespace moe_fp8 {

struct Segment {  // columns that share a scale in each row
  int64_t begin, end;
  ColumnBlock block;
};
// Appends the segments of the columns [begin, end) of one group, whose first scaling block is `first_block`.
inline void add_segments(std::vector<Segment>& segments, const OperandScales& scales, int64_t begin, int64_t end,
                         int first_block) {
  const int64_t step = scales.block_size ? scales.block_size : end - begin;
  for (int64_t k = begin; k < end; k += step)
    segments.push_back(
        {k, k + step < end ? k + step : end, scales.block(first_block, int(end - begin), int(k - begin))});
}

// The values of all 256 bytes of an fp8 type.
std::array<float, 256> decoded(Fp8Type type);

// Dequantizes the row q: out[k] = RN(values[q[k]] * scale). `group` and `row` are its indices among the scales. Without
// scales it only decodes.
template <class Out>
void dequantize_row(const std::array<float, 256>& values, const OperandScales& scales, int64_t group, int64_t row,
                    const std::vector<Segment>& segments, const uint8_t* q, typename Out::Bits* out) {
  for (const Segment& s : segments) {
    const float scale = scales.data ? scales.at(group, row, s.block) : 1.f;
    for (int64_t k = s.begin; k < s.end; ++k) out[k] = Out::from_float(values[q[k]] * scale);
  }
}

}  // namespace moe_fp8
