// Where the scale of an element of a quantized operand lies, and its value: for kernels and for the CPU's loops.
#pragma once
#include "numerics/scale_layout.h"
#include "platform/bits.h"

namespace moe_fp8 {

// 2^(e - 127); 255 is NaN. From bits, for 2^-127 is a subnormal.
MOE_HD float e8m0_to_float(uint8_t e) {
  return as_float(e == 0 ? 0x00400000u : e == 255 ? 0x7fc00000u : uint32_t(e) << 23);
}

// Scales along a row of a matrix, whose place needs no division: bits on their way, then values.
struct RowScales {
  const uint8_t* first;
  int64_t step;       // bytes to the next scale,
  int more_at_fourth;  // and so many more to the next but three
  bool is_float;

  MOE_HD uint32_t bits(uint32_t block) const {
    const uint8_t* at = first + block * step + int64_t(block >> 2) * more_at_fourth;
    return is_float ? *reinterpret_cast<const uint32_t*>(at) : *at;
  }
  MOE_HD float value(uint32_t bits) const { return is_float ? as_float(bits) : e8m0_to_float(uint8_t(bits)); }
};

enum class ScaleLayout : int { kFloat, kE8M0, kBlocked };  // the last: E8M0 in the blocks of scale_layout.h

// Scales of a group begin anew at so many rows or columns: at a block of 128, at 4 of 32, at a block of 128 x 4 scales;
// but those of kE8M0 lie by position, for its groups begin at multiples of a block.
constexpr int kGroupScales = 128;
static_assert(kGroupScales == kBlock && kGroupScales == kScaleRows && kGroupScales == kMxBlock * kScaleColumns);

// A scaling block along the columns: number `at` of the `count` of its group, whose first is number `first` of all.
struct ColumnBlock { int first, count, at; };

struct OperandScales {
  const void* data;
  int64_t group_stride, row_stride;  // elements; kBlocked has no row_stride
  int64_t block_stride;              // kBlocked: of a column, hence the padded rows
  int blocks;                        // along the columns, at least where groups begin blocks anew; 0: of whole rows
  int block_size = 0;                // elements along the columns; 0: a scale is that of a whole row, of its group
  int rows_log2 = 0;                 // so many rows share scales
  ScaleLayout layout = ScaleLayout::kFloat;

  MOE_HD ColumnBlock block(int first, int columns, int at) const {  // of column `at` of a group of so many columns
    if (block_size == 0) return {first, 1, 0};
    return {first, ceil_div(columns, block_size), at / block_size};
  }
  MOE_HD RowScales of_row(int64_t row) const {  // of the only group
    const auto* bytes = static_cast<const uint8_t*>(data);
    if (layout == ScaleLayout::kBlocked)
      return {bytes + blocked_offset(row, 0, padded_scale_columns(blocks)), 1, kScaleBytes - kScaleColumns, false};
    const int64_t size = layout == ScaleLayout::kFloat ? 4 : 1;
    return {bytes + row * row_stride * size, block_stride * size, 0, size == 4};
  }
  MOE_HD int64_t row_step() const {  // bytes, from the scales of an even row to those of the next one
    return layout == ScaleLayout::kBlocked ? 4 * kScaleColumns : row_stride * (layout == ScaleLayout::kFloat ? 4 : 1);
  }
  MOE_HD float at(int64_t group, int64_t row, ColumnBlock b) const {
    const auto* bytes = static_cast<const uint8_t*>(data) + group * group_stride;
    if (layout == ScaleLayout::kBlocked) {
      const int64_t in_group = blocked_offset(row, b.at, padded_scale_columns(b.count));
      return e8m0_to_float(bytes[b.first * block_stride + in_group]);
    }
    const int block = b.first + b.at, last = blocks > 0 ? blocks - 1 : 0;  // what offsets of groups say is not trusted
    const int64_t in_group = (row >> rows_log2) * row_stride + (block < last ? block : last) * block_stride;
    if (layout == ScaleLayout::kE8M0) return e8m0_to_float(bytes[in_group]);
    return static_cast<const float*>(data)[group * group_stride + in_group];
  }
  // The bytes of four scales, not kFloat's; the first is a multiple of four in its group. Behind its last is anything.
  MOE_HD uint32_t four_at(int64_t group, int64_t row, ColumnBlock b) const {
    uint32_t four = 0;
    if (layout == ScaleLayout::kBlocked) {
      const auto* bytes = static_cast<const uint8_t*>(data) + group * group_stride + b.first * block_stride;
      memcpy(&four, bytes + blocked_offset(row, b.at, padded_scale_columns(b.count)), 4);
    } else {
      for (int i = 0; i < 4; ++i) four |= as_bits(at(group, row, {b.first, b.count, b.at + i})) >> 23 << (8 * i);
    }
    return four;
  }
};

}  // namespace moe_fp8
