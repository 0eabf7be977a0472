// Where the scale of an element of a quantized operand lies, and its value: for kernels and for the CPU's loops.
#pragma once
#include "numerics/scale_layout.h"
#include "platform/bits.h"

namespace moe_fp8 {

// 2^(e - 127); 255 is NaN. From bits, for 2^-127 is a subnormal.
MOE_HD float e8m0_to_float(uint8_t e) {
  return as_float(e == 0 ? 0x00400000u : e == 255 ? 0x7fc00000u : uint32_t(e) << 23);
}

// Of a float, or of the byte of E8M0: so loads of bits can be on their way before anything waits for a value.
MOE_HD float scale_of_bits(uint32_t bits, bool is_float) {
  return is_float ? as_float(bits) : e8m0_to_float(uint8_t(bits));
}

// Scales along a row of a matrix, whose place needs no division.
struct RowScales {
  const uint8_t* first;
  int64_t step;       // bytes to the next scale,
  int block4_stride;  // and so many more to the next but three
  bool is_float;

  MOE_HD int64_t offset(uint32_t block) const { return block * step + int64_t(block >> 2) * block4_stride; }
  MOE_HD uint32_t bits_at(int64_t offset) const {
    const uint8_t* at = first + offset;
    return is_float ? as_bits(*reinterpret_cast<const float*>(at)) : *at;
  }
  MOE_HD uint32_t bits(uint32_t block) const { return bits_at(offset(block)); }
  MOE_HD float value(uint32_t bits) const { return scale_of_bits(bits, is_float); }
};

enum class ScaleLayout : int { kFloat, kE8M0, kBlocked };  // the last: E8M0 in the blocks of scale_layout.h

// Scales of a group begin anew at so many rows or columns: at a block of 128, at 4 of 32, at a block of 128 x 4 scales;
// but those of kE8M0 lie by position, for its groups begin at multiples of a block.
constexpr int kGroupScales = 128;
static_assert(kGroupScales == kBlock && kGroupScales == kScaleRows && kGroupScales == kMxBlock * kScaleColumns);

// A scaling block along the columns: number `at` of the `count` of its group, whose first is number `first` of all.
struct ColumnBlock { int first, count, at; };

// Scales down the rows of a matrix, of one scaling block along the columns.
struct ColumnScales {
  const void* data;
  int64_t first, group_step, row_step;  // bytes: to row 0, then to the next group and to the next rows with a scale
  int rows_log2;                        // so many rows share scales
  int padded_columns;                   // of kBlocked, which has no row_step
  ScaleLayout layout;

  MOE_HD uint32_t bits(int64_t group, int64_t row) const {
    const auto* of_group = static_cast<const uint8_t*>(data) + (first + group * group_step);
    if (layout == ScaleLayout::kBlocked) return of_group[blocked_offset(uint32_t(row), 0, padded_columns)];
    const uint8_t* at = of_group + (row >> rows_log2) * row_step;
    return layout == ScaleLayout::kFloat ? as_bits(*reinterpret_cast<const float*>(at)) : *at;
  }
  MOE_HD float value(uint32_t bits) const { return scale_of_bits(bits, layout == ScaleLayout::kFloat); }
};

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
  MOE_HD RowScales scales_of_row(int64_t row) const {  // of the only group
    const auto* bytes = static_cast<const uint8_t*>(data);
    if (layout == ScaleLayout::kBlocked) {
      const int64_t at = blocked_offset(uint32_t(row), 0, padded_scale_columns(blocks));
      return {bytes + at, 1, kScaleBytes - kScaleColumns, false};
    }
    const int64_t size = layout == ScaleLayout::kFloat ? 4 : 1;
    return {bytes + row * row_stride * size, block_stride * size, 0, size == 4};
  }
  MOE_HD int64_t row_step() const {  // bytes, from the scales of an even row to those of the next one
    return layout == ScaleLayout::kBlocked ? 4 * kScaleColumns : row_stride * (layout == ScaleLayout::kFloat ? 4 : 1);
  }
  MOE_HD ColumnScales scales_of_column(ColumnBlock b) const {
    if (layout == ScaleLayout::kBlocked) {
      const int padded = int(padded_scale_columns(b.count));
      return {data, b.first * block_stride + blocked_offset(0, b.at, padded), group_stride, 0, 0, padded, layout};
    }
    const int block = b.first + b.at, last = blocks > 0 ? blocks - 1 : 0;  // what offsets of groups say is not trusted
    const int64_t size = layout == ScaleLayout::kFloat ? 4 : 1;
    return {data, (block < last ? block : last) * block_stride * size, group_stride * size, row_stride * size,
            rows_log2, 0, layout};
  }
  MOE_HD float at(int64_t group, int64_t row, ColumnBlock b) const {
    const ColumnScales scales = scales_of_column(b);
    return scales.value(scales.bits(group, row));
  }
  // The bytes of four scales, not kFloat's; the first is a multiple of four in its group. Behind its last is anything.
  MOE_HD uint32_t four_bits_at(int64_t group, int64_t row, ColumnBlock b) const {
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
