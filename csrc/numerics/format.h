// Format: the one description of a quantized operand. Shapes, strides, alignment and the place of every scale derive
// from it: in kernels (as a type), in CPU loops, dequantize and GEMMs (as a value), and in Python (read from _C).
#pragma once
#include "numerics/floats.h"
#include "numerics/scale_layout.h"

namespace moe_fp8 {

enum class ScaleType : int { kF32, kE8M0 };

// How the multiplier of a scaling block derives from its amax: see numerics/scale.h. kExact and kPow2 are for float32
// scales, kRceil and kFloor for E8M0 scales.
enum class Rounding : int { kExact, kPow2, kRceil, kFloor };
inline constexpr const char* kRoundingNames[] = {"exact", "pow2", "rceil", "floor"};

// Granularity of scales along tokens: kGroup per scaling block of a column, kBatch one per column over the rows of all
// groups, kSquare one per square of `block` tokens of a group by `weight_rows` columns.
enum class Amax : int { kGroup, kBatch, kSquare };
inline constexpr const char* kAmaxNames[] = {"group", "batch", "square"};

// Layout of a matrix of scales. kColumnMajor: columns are scale_stride() elements apart. kBlocked: see scale_layout.h.
enum class ScaleOrder : int { kRowMajor, kColumnMajor, kBlocked };

struct Format {
  const char* name;
  int block;        // elements along K that share a scale; 0: a whole row, or all tokens of a group in a column
  int weight_rows;  // rows of a weight that share a scale, `block` columns of each
  ScaleType scale_type;
  ScaleOrder order;
  int min_align, max_align, align;  // multiples to which groups can be padded along tokens, and the default one
  Rounding roundings[2];            // the supported roundings; the first is the default
  Amax wider_amax;                  // the granularity along tokens that is supported besides kGroup; kGroup: none

  constexpr bool supports(Rounding r) const { return roundings[0] == r || roundings[1] == r; }
  constexpr bool blocked() const { return order == ScaleOrder::kBlocked; }
  // How many scaling blocks `elements` elements have.
  constexpr int64_t blocks(int64_t elements) const { return block ? ceil_div<int64_t>(elements, block) : 1; }
};

enum class FormatId : int { kRowwise, kBlockwise, kMxfp8, kMxfp8RowMajor };
inline constexpr Format kFormats[] = {
    {"rowwise", 0, 1, ScaleType::kF32, ScaleOrder::kRowMajor, 1, 256, 32, {Rounding::kExact, Rounding::kPow2},
     Amax::kBatch},
    {"blockwise", kBlock, kBlock, ScaleType::kF32, ScaleOrder::kColumnMajor, 1, 256, 32,
     {Rounding::kExact, Rounding::kPow2}, Amax::kSquare},
    {"mxfp8", kMxBlock, 1, ScaleType::kE8M0, ScaleOrder::kBlocked, 32, 128, 32, {Rounding::kRceil, Rounding::kFloor},
     Amax::kGroup},
    {"mxfp8_rowmajor", kMxBlock, 1, ScaleType::kE8M0, ScaleOrder::kRowMajor, 32, 128, 32,
     {Rounding::kRceil, Rounding::kFloor}, Amax::kGroup},
};
inline constexpr int kNumFormats = sizeof(kFormats) / sizeof(kFormats[0]);
constexpr const Format& format_of(FormatId id) { return kFormats[int(id)]; }

// Scales of each type have two roundings. numerics/scale.h takes a bool: whether it is the second.
constexpr Rounding first_rounding(ScaleType t) { return t == ScaleType::kF32 ? Rounding::kExact : Rounding::kRceil; }
MOE_HD constexpr Rounding second_rounding(ScaleType t) {
  return t == ScaleType::kF32 ? Rounding::kPow2 : Rounding::kFloor;
}

// Whether quantizers, dequantize and GEMMs support this kind of scales. A new kind needs more than an entry above: a
// map in quantize/row_block_map.h, the scales of a tile in quantize/tile_scales.h, and their readers in cpu/ and gemm/.
constexpr bool is_supported_kind(const Format& f) {
  if (!f.supports(first_rounding(f.scale_type)) || !f.supports(second_rounding(f.scale_type))) return false;
  const bool f32 = f.scale_type == ScaleType::kF32;
  const bool rowwise = f.block == 0 && f.weight_rows == 1 && f32 && f.order == ScaleOrder::kRowMajor;
  const bool blockwise = f.block == kBlock && f.weight_rows == kBlock && f32 && f.order == ScaleOrder::kColumnMajor;
  const bool mx = f.block == kMxBlock && f.weight_rows == 1 && !f32 && f.order != ScaleOrder::kColumnMajor;
  return rowwise || blockwise || (mx && f.min_align >= kMxBlock);
}
constexpr bool are_supported_kinds() {
  for (const Format& f : kFormats)
    if (!is_supported_kind(f)) return false;
  return true;
}
static_assert(are_supported_kinds(), "kFormats has a format of an unsupported kind: see is_supported_kind()");

}  // namespace moe_fp8
