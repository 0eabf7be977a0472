// Scales of quantized operands: how they are checked, and where each scale lies.
#pragma once
#include "numerics/operand_scales.h"
#include "ops/checks.h"

namespace moe_fp8 {

// Whether scales of q are along tokens. q then is a matrix, and has groups.
inline bool check_along_tokens(const char* op, std::string_view along, const Tensor& q, bool has_offs) {
  constexpr const char* kDirections[] = {"rows", "tokens"};
  if (check_choice(op, "along", along, kDirections) == 0) return false;
  check_dims({op, "q"}, q, 2, 2);
  if (!has_offs) fail(op, ": offs must be given along tokens, got None");
  return true;
}

inline OperandScales described(const Format& f, const Tensor& scale, int64_t blocks) {
  OperandScales s = {scale.data, 0, 0, 1, int(blocks), f.block};
  s.layout = f.blocked() ? ScaleLayout::kBlocked : f.scale_type == ScaleType::kE8M0 ? ScaleLayout::kE8M0
                                                                                    : ScaleLayout::kFloat;
  return s;
}

inline int squares_log2(const Format& f) {  // log2 of the rows of a square
  int log2 = 0;
  while (1 << log2 < f.weight_rows) ++log2;
  return log2;
}

// Scales along rows of K elements. `leading` holds `dims` sizes, of all dimensions but the last. `rows` counts the rows
// of one matrix, E the groups (kNoGroups without groups).
inline OperandScales scales_of_rows(Name arg, const Tensor& scale, const Format& f, const int64_t* leading,
                                    int64_t dims, int64_t rows, int64_t K, int64_t E) {
  OperandScales s = described(f, scale, f.blocks(K));
  if (f.order != ScaleOrder::kRowMajor) {
    check_scales(arg, scale, f, scales_along_rows(f, rows, K, E).sizes, 2);
    s.row_stride = f.blocked() ? 0 : scale.strides[0];
    s.block_stride = f.blocked() ? 0 : scale.strides[1];
    return s;
  }
  int64_t sizes[kMaxDims];
  std::copy_n(leading, dims, sizes);
  if (f.block) sizes[dims++] = s.blocks;
  check_scales(arg, scale, f, sizes, dims);
  s.group_stride = rows * s.blocks;
  s.row_stride = s.blocks;
  return s;
}

// Scales along tokens, of K rows of `positions` positions in groups that end at offs. Column-major scales may have more
// blocks than the positions fill, because the quantizer makes room for any groups. They have one row for each of K
// rows, or for each square of rows. transposed: the scales belong to b of a product.
inline OperandScales scales_of_tokens(Name arg, const Tensor& scale, const Format& f, int64_t K,
                                      int64_t positions, const Tensor& offs, bool transposed = false) {
  const int64_t E = offs.sizes[0];
  OperandScales s = described(f, scale, f.blocks(positions));
  if (f.order != ScaleOrder::kColumnMajor) {
    check_scales(arg, scale, f, scales_along_tokens(f, K, positions, E, 0).sizes, 2);
    if (f.block == 0) {
      s.row_stride = 1;
      s.group_stride = s.block_stride = K;
      s.blocks = int(E);
    } else if (f.blocked()) {
      s.block_stride = padded_scale_rows(K);
    } else {
      s.row_stride = s.blocks;
    }
    return s;
  }
  check_dtype(arg, scale.dtype, scale_dtype(f.scale_type));
  check_dims(arg, scale, 2, 2);
  const int row_dim = transposed ? 1 : 0, block_dim = 1 - row_dim;
  const int64_t squares = scales_of_columns(f, K, Amax::kSquare), rows = scale.sizes[row_dim];
  if (rows != K && rows != squares)
    fail(arg.op, ": ", arg.arg, " must have size ", K, ", or ", squares, " of squares, in dimension ", row_dim,
         ", got ", rows);
  if (rows != K) s.rows_log2 = squares_log2(f);
  const int64_t blocks = scale.sizes[block_dim];
  if (blocks < s.blocks)
    fail(arg.op, ": ", arg.arg, " must have at least ", s.blocks, " blocks in dimension ", block_dim, ", got ",
         blocks);
  check_limit(arg.op, arg.arg, blocks, "blocks");
  if (validates()) {
    int64_t used = 0, start = 0;
    for (const int end : contents(offs)) {
      used += f.blocks(end - start);
      start = end;
    }
    if (used > blocks)
      fail(arg.op, ": ", arg.arg, " must have ", used, " blocks in dimension ", block_dim,
           ", as offs has of them, got ", blocks);
  }
  s.blocks = int(blocks);
  s.row_stride = scale.strides[row_dim];
  s.block_stride = scale.strides[block_dim];
  return s;
}

// Scales of E weights [rows, columns]. transposed: scales of squares as b of a product has them.
inline OperandScales scales_of_experts(Name arg, const Tensor& scale, const Format& f, int64_t E,
                                       int64_t rows, int64_t columns, bool transposed = false) {
  ScaleShape shape = scales_of_weight(f, E, rows, columns);
  transposed = transposed && f.weight_rows > 1;
  if (transposed) std::swap(shape.sizes[1], shape.sizes[2]);
  check_scales(arg, scale, f, shape.sizes, shape.dims);
  OperandScales s = described(f, scale, f.blocks(columns));
  if (f.weight_rows > 1) {
    s.group_stride = scale.strides[0];
    s.row_stride = scale.strides[transposed ? 2 : 1];
    s.block_stride = scale.strides[transposed ? 1 : 2];
    s.rows_log2 = squares_log2(f);
  } else if (f.blocked()) {
    s.group_stride = shape.sizes[1];
    s.block_stride = 0;
  } else {
    s.group_stride = rows * s.blocks;
    s.row_stride = s.blocks;
  }
  return s;
}

}  // namespace moe_fp8
