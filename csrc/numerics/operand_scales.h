// Reads the scales of a quantized operand: the place and the value of an element's scale, in kernels and CPU loops.
#pragma once
#include "numerics/scale_layout.h"
#include "platform/bits.h"

namespace moe_fp8 {

// 2^(e - 127); 255 is NaN. Made from bits, because 2^-127 is a subnormal.
MOE_HD float e8m0_to_float(uint8_t e) {
  return as_float(e == 0 ? 0x00400000u : e == 255 ? 0x7fc00000u : uint32_t(e) << 23);
}

// The value of a scale from its stored bits: a float32, or an E8M0 byte. Code loads many scales as bits first, so that
// no load waits for the value of another.
MOE_HD float scale_of_bits(uint32_t bits, bool is_float) {
  return is_float ? as_float(bits) : e8m0_to_float(uint8_t(bits));
}

// Scales along one row of a matrix. Finding one needs no division.
struct RowScales {
  const uint8_t* first;
  int64_t step;       // bytes to the next scale
  int block4_stride;  // extra bytes after every fourth scale (128x4 atom)
  bool is_float;

  MOE_HD int64_t offset(uint32_t block) const { return block * step + int64_t(block >> 2) * block4_stride; }
  MOE_HD uint32_t bits_at(int64_t offset) const {
    const uint8_t* at = first + offset;
    return is_float ? as_bits(*reinterpret_cast<const float*>(at)) : *at;
  }
  MOE_HD uint32_t bits(uint32_t block) const { return bits_at(offset(block)); }
  MOE_HD float value(uint32_t bits) const { return scale_of_bits(bits, is_float); }
};

enum class ScaleLayout : int { kFloat, kE8M0, kBlocked };  // kBlocked: E8M0 scales in the blocks of scale_layout.h

// The scales of a group begin at a multiple of this many rows or columns of the operand: one block of 128, four blocks
// of 32, or one block of 128 x 4 scales. Exception: kE8M0 scales lie by position, because their groups begin at
// multiples of a scaling block.
constexpr int kGroupScales = 128;
static_assert(kGroupScales == kBlock && kGroupScales == kScaleRows && kGroupScales == kMxBlock * kScaleColumns);

// A scaling block along the columns: block `at` of the `count` blocks of a group, whose first block is block `first` of
// the matrix.
struct ColumnBlock { int first, count, at; };

// Scales of one scaling block along the columns, for the rows of a matrix.
struct ColumnScales {
  const void* data;
  int64_t first, group_step, row_step;  // bytes to row 0, to the next group, and to the next row of scales
  int rows_log2;                        // 2^rows_log2 rows share scales
  int padded_columns;                   // used by kBlocked, which has no row_step
  ScaleLayout layout;

  MOE_HD uint32_t bits(int64_t group, int64_t row) const {
    const auto* group_scales = static_cast<const uint8_t*>(data) + (first + group * group_step);
    if (layout == ScaleLayout::kBlocked) return group_scales[blocked_offset(uint32_t(row), 0, padded_columns)];
    const uint8_t* at = group_scales + (row >> rows_log2) * row_step;
    return layout == ScaleLayout::kFloat ? as_bits(*reinterpret_cast<const float*>(at)) : *at;
  }
  MOE_HD float value(uint32_t bits) const { return scale_of_bits(bits, layout == ScaleLayout::kFloat); }
};

struct OperandScales {
  const void* data;
  int64_t group_stride, row_stride;  // elements; kBlocked has no row_stride
  int64_t block_stride;              // kBlocked: elements of a column of scales, which are the padded rows
  int blocks;                        // blocks along the columns, or more if groups begin new blocks; 0: whole rows
  int block_size = 0;                // elements of a block along the columns; 0: a whole row, or a group's part of it
  int rows_log2 = 0;                 // 2^rows_log2 rows share scales
  ScaleLayout layout = ScaleLayout::kFloat;

  // The block of column `at` in a group of `columns` columns, whose first block is `first`.
  MOE_HD ColumnBlock block(int first, int columns, int at) const {
    if (block_size == 0) return {first, 1, 0};
    return {first, ceil_div(columns, block_size), at / block_size};
  }
  // Scales along a row, if there is one group.
  MOE_HD RowScales scales_of_row(int64_t row) const {
    const auto* bytes = static_cast<const uint8_t*>(data);
    if (layout == ScaleLayout::kBlocked) {
      const int64_t at = blocked_offset(uint32_t(row), 0, padded_scale_columns(blocks));
      return {bytes + at, 1, kScaleBytes - kScaleColumns, false};
    }
    const int64_t size = layout == ScaleLayout::kFloat ? 4 : 1;
    return {bytes + row * row_stride * size, block_stride * size, 0, size == 4};
  }
  // Bytes from the scales of an even row to the scales of the next row.
  MOE_HD int64_t row_step() const {
    return layout == ScaleLayout::kBlocked ? 4 * kScaleColumns : row_stride * (layout == ScaleLayout::kFloat ? 4 : 1);
  }
  MOE_HD ColumnScales scales_of_column(ColumnBlock b) const {
    if (layout == ScaleLayout::kBlocked) {
      const int padded = int(padded_scale_columns(b.count));
      return {data, b.first * block_stride + blocked_offset(0, b.at, padded), group_stride, 0, 0, padded, layout};
    }
    const int block = b.first + b.at, last = blocks > 0 ? blocks - 1 : 0;  // clamped: group offsets are not trusted
    const int64_t size = layout == ScaleLayout::kFloat ? 4 : 1;
    return {data, (block < last ? block : last) * block_stride * size, group_stride * size, row_stride * size,
            rows_log2, 0, layout};
  }
  MOE_HD float at(int64_t group, int64_t row, ColumnBlock b) const {
    const ColumnScales scales = scales_of_column(b);
    return scales.value(scales.bits(group, row));
  }
  // The bytes of four E8M0 scales of a row, from a multiple of four in its group on. Bytes behind the group's last
  // block are undefined.
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
