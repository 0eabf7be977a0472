// Shapes of scale tensors. All are contiguous except kColumnMajor, whose columns are padded.
#pragma once
#include "numerics/format.h"
#include "numerics/groups.h"

namespace moe_fp8 {

struct ScaleShape {
  int dims;
  int64_t sizes[3];
  int64_t column_stride = -1;  // elements between columns of kColumnMajor; 0 without rows

  // Elements, including the padding between columns.
  int64_t extent() const {
    if (column_stride >= 0) return sizes[1] * column_stride;
    return sizes[0] * (dims > 1 ? sizes[1] : 1) * (dims > 2 ? sizes[2] : 1);
  }
};

constexpr int64_t kNoGroups = -1;

// Scales along rows of K elements, in E groups or without groups (kNoGroups).
constexpr ScaleShape scales_along_rows(const Format& f, int64_t rows, int64_t K, int64_t E) {
  const int64_t blocks = f.blocks(K);
  if (f.block == 0) return {1, {rows}};
  switch (f.order) {
    case ScaleOrder::kRowMajor: return {2, {rows, blocks}};
    case ScaleOrder::kColumnMajor: return {2, {rows, blocks}, scale_stride(rows)};
    default: {
      const int64_t padded_rows = E == kNoGroups ? padded_scale_rows(rows) : grouped_scale_rows(rows, E);
      return {2, {padded_rows, padded_scale_columns(blocks)}};
    }
  }
}
// How many scales K columns have along tokens: one per column, or one per square of columns.
constexpr int64_t scales_of_columns(const Format& f, int64_t K, Amax amax) {
  return amax == Amax::kSquare ? ceil_div<int64_t>(K, f.weight_rows) : K;
}
// Scales along the tokens of q_t [K, positions], in E groups. Blocks begin anew with every group. Column-major scales
// have room for `blocks` of them.
constexpr ScaleShape scales_along_tokens(const Format& f, int64_t K, int64_t positions, int64_t E, int64_t blocks,
                                         Amax amax = Amax::kGroup) {
  if (f.block == 0) return {2, {E, K}};
  switch (f.order) {
    case ScaleOrder::kRowMajor: return {2, {K, f.blocks(positions)}};
    case ScaleOrder::kColumnMajor: {
      const int64_t rows = scales_of_columns(f, K, amax);
      return {2, {rows, blocks}, scale_stride(rows)};
    }
    default: return {2, {padded_scale_rows(K), grouped_scale_columns(f.blocks(positions), E)}};
  }
}
// Scales of E matrices [rows, columns]: weights of experts, or their transposes.
constexpr ScaleShape scales_of_weight(const Format& f, int64_t E, int64_t rows, int64_t columns) {
  const int64_t blocks = f.blocks(columns);
  if (f.blocked()) return {2, {E, padded_scale_rows(rows) * padded_scale_columns(blocks)}};
  if (f.block == 0) return {2, {E, rows}};
  return {3, {E, ceil_div<int64_t>(rows, f.weight_rows), blocks}};
}

}  // namespace moe_fp8
