// What a quantized operand is: the one description from which shapes, strides, alignment and the place of every scale
// derive, for kernels (as a type), CPU loops, dequantize and GEMMs (as a value) and Python (read from _C).
#pragma once
#include "numerics/floats.h"
#include "numerics/scale_layout.h"

namespace moe_fp8 {

enum class ScaleType : int { kF32, kE8M0 };

// From the amax of a scaling block to its multiplier; see numerics/scale.h. The first two are float scales', the others
// E8M0's.
enum class Rounding : int { kExact, kPow2, kRceil, kFloor };
inline constexpr const char* kRoundingNames[] = {"exact", "pow2", "rceil", "floor"};

// Of what a column has its amax along tokens: of its own scaling blocks, of the rows of all groups, or, as all columns
// of a square, of `block` tokens of a group by `weight_rows` columns.
enum class Amax : int { kGroup, kBatch, kSquare };
inline constexpr const char* kAmaxNames[] = {"group", "batch", "square"};

// How a matrix of scales lies. kColumnMajor: columns are scale_stride() elements apart. kBlocked: scale_layout.h.
enum class ScaleOrder : int { kRowMajor, kColumnMajor, kBlocked };

struct Format {
  const char* name;
  int block;             // neighbouring elements along the summed dimension that share a scale; 0: a row, or all tokens
                         // of a group in a column
  int weight_rows;       // rows of a weight that share theirs: with `block` columns each
  ScaleType scale_type;
  ScaleOrder order;
  int min_align, max_align, align;  // multiples to which groups can be padded along tokens, and the usual one
  Rounding roundings[2];               // that it knows; the first is the usual one
  Amax wider_amax;                          // the amax along tokens that it knows beside that of groups; kGroup: none

  constexpr bool supports(Rounding r) const { return roundings[0] == r || roundings[1] == r; }
  constexpr bool blocked() const { return order == ScaleOrder::kBlocked; }
  // Scaling blocks of so many elements.
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

// The two roundings that scales of a type know: numerics/scale.h is told whether it is the second.
constexpr Rounding first_rounding(ScaleType t) { return t == ScaleType::kF32 ? Rounding::kExact : Rounding::kRceil; }
MOE_HD constexpr Rounding second_rounding(ScaleType t) {
  return t == ScaleType::kF32 ? Rounding::kPow2 : Rounding::kFloor;
}

// The kinds of scales that quantizers, dequantize and GEMMs know: another one is not an entry above alone. It is a map
// of quantize/row_block_map.h, the scales of a tile in quantize/tile_scales.h, and in cpu/ and gemm/ what reads them.
constexpr bool is_supported_kind(const Format& f) {
  if (!f.supports(first_rounding(f.scale_type)) || !f.supports(second_rounding(f.scale_type))) return false;
  const bool floats = f.scale_type == ScaleType::kF32;
  const bool of_rows = f.block == 0 && f.weight_rows == 1 && floats && f.order == ScaleOrder::kRowMajor;
  const bool of_squares = f.block == kBlock && f.weight_rows == kBlock && floats && f.order == ScaleOrder::kColumnMajor;
  const bool of_32 = f.block == kMxBlock && f.weight_rows == 1 && !floats && f.order != ScaleOrder::kColumnMajor;
  return of_rows || of_squares || (of_32 && f.min_align >= kMxBlock);
}
constexpr bool are_supported_kinds() {
  for (const Format& f : kFormats)
    if (!is_supported_kind(f)) return false;
  return true;
}
static_assert(are_supported_kinds(), "kFormats has a format of an unsupported kind: see is_supported_kind()");

}  // namespace moe_fp8
