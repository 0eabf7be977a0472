#include "scales/expand_scales.h"
#include "scales/swizzle_scales.h"

#include "ops/operands.h"

namespace moe_fp8 {
namespace {

constexpr const char *kSwizzle = "swizzle_scales", *kUnswizzle = "unswizzle_scales", *kExpand = "expand_scales";

// The meaning of `groups`: whether offs divide rows or columns, or every expert has a matrix.
struct Layout {
  Groups groups;
  bool experts;
};
Layout check_groups(const char* op, std::optional<std::string_view> groups, bool has_offs) {
  Layout layout = {Groups::kNone, false};
  if (groups == "rows") layout.groups = Groups::kRows;
  else if (groups == "columns") layout.groups = Groups::kColumns;
  else if (groups == "experts") layout.experts = true;
  else if (groups) fail(op, ": groups must be None, 'rows', 'columns' or 'experts', got '", *groups, "'");
  const bool wanted = layout.groups != Groups::kNone;
  if (wanted && !has_offs) fail(op, ": offs must be given with groups '", *groups, "', got None");
  if (!wanted && has_offs)
    fail(op, ": offs must be None with groups ", groups ? *groups : std::string_view("None"), ", got a tensor");
  return layout;
}
// Checks offs, and that the padded rows or columns of `arg` that they divide have room.
void check_offs(Name arg, const Tensor& offs, Groups groups, int64_t R, int64_t C) {
  const bool by_rows = groups == Groups::kRows;
  validate_offs(arg.op, offs, by_rows ? R : C, by_rows ? "rows" : "columns");
  const BlockedExtent extent = blocked_extent(groups, offs.sizes[0], R, C);
  check_limit(arg.op, arg.arg, by_rows ? extent.rows : extent.columns,
              by_rows ? "rows with padding" : "columns with padding");
}

}  // namespace

Results<2> swizzle_scales_op(const Tensor& scale, std::optional<std::string_view> groups,
                             const std::optional<Tensor>& offs) {
  const Layout layout = check_groups(kSwizzle, groups, offs.has_value());
  check_dims({kSwizzle, "scale"}, scale, layout.experts ? 3 : 2, layout.experts ? 3 : 2);
  const int64_t R = scale.sizes[scale.dim - 2], C = scale.sizes[scale.dim - 1];
  if (offs) check_offs({kSwizzle, "scale"}, *offs, layout.groups, R, C);
  const int64_t E = offs ? offs->sizes[0] : layout.experts ? scale.sizes[0] : 1;
  const Call call(kSwizzle, "scale", scale);
  Handle starts = call.empty({offs ? E : 0}, kInt32), blocked;
  if (layout.experts) {
    blocked = call.empty({E, padded_scale_rows(R) * padded_scale_columns(C)}, scale.dtype);
  } else {
    const BlockedExtent extent = blocked_extent(layout.groups, E, R, C);
    blocked = call.empty({extent.rows, extent.columns}, scale.dtype);
  }
  if (layout.experts && scale.empty()) return results(blocked, starts);  // of any number of experts
  const SwizzleScalesParams p = {scale.as<uint8_t>(), data<uint8_t>(blocked), offs ? offs->as<int>() : nullptr,
                                 offs && E ? data<int>(starts) : nullptr, E, R, C, scale.strides[scale.dim - 2],
                                 layout.experts ? scale.strides[0] : 0, layout.groups};
  MOE_FP8_RUN(call, swizzle_scales, p);
  return results(blocked, starts);
}

Results<1> unswizzle_scales_op(const Tensor& blocked, int64_t rows, int64_t cols,
                               std::optional<std::string_view> groups, const std::optional<Tensor>& offs) {
  const Layout layout = check_groups(kUnswizzle, groups, offs.has_value());
  check_count(kUnswizzle, "rows", rows);
  check_count(kUnswizzle, "cols", cols);
  if (offs) check_offs({kUnswizzle, "blocked"}, *offs, layout.groups, rows, cols);
  const int64_t E = offs ? offs->sizes[0] : layout.experts ? blocked.sizes[0] : 1;
  if (layout.experts) {
    check_size({kUnswizzle, "blocked"}, blocked, 1, padded_scale_rows(rows) * padded_scale_columns(cols));
  } else {
    const BlockedExtent extent = blocked_extent(layout.groups, E, rows, cols);
    check_sizes({kUnswizzle, "blocked"}, blocked, {extent.rows, extent.columns});
  }
  const Call call(kUnswizzle, "blocked", blocked);
  Handle scale = layout.experts ? call.empty({E, rows, cols}, blocked.dtype) : call.empty({rows, cols}, blocked.dtype);
  if (layout.experts && blocked.empty()) return results(scale);  // of any number of experts
  const SwizzleScalesParams p = {blocked.as<uint8_t>(), data<uint8_t>(scale), offs ? offs->as<int>() : nullptr,
                                 nullptr, E, rows, cols, cols, layout.experts ? rows * cols : 0, layout.groups};
  MOE_FP8_RUN(call, unswizzle_scales, p);
  return results(scale);
}

Results<1> expand_scales_op(const Tensor& q, const Tensor& scale, std::string_view along,
                            const std::optional<Tensor>& offs) {
  constexpr const Format &kFrom = format_of(FormatId::kBlockwise), &kTo = format_of(FormatId::kMxfp8);
  const bool along_tokens = check_along_tokens(kExpand, along, q, offs.has_value()), weight = q.dim == 3;
  if (weight && offs) fail(kExpand, ": offs must be None for a weight, got a tensor");
  const int64_t rows = q.sizes[q.dim - 2], K = q.sizes[q.dim - 1];
  ExpandScalesParams p = {{}, nullptr, nullptr, weight ? q.sizes[0] : 1, rows, K, Groups::kNone};
  if (offs) {
    validate_offs(kExpand, *offs, along_tokens ? K : rows, along_tokens ? "columns" : "rows");
    p.groups = along_tokens ? Groups::kColumns : Groups::kRows;
    p.E = offs->sizes[0];
    check_extent(kExpand, "q", along_tokens ? K : rows, p.E, kGroupScales,
                 along_tokens ? "columns with padding" : "rows with padding");
  }
  p.scale = along_tokens ? scales_of_tokens({kExpand, "scale"}, scale, kFrom, rows, K, *offs)
            : weight     ? scales_of_experts({kExpand, "scale"}, scale, kFrom, p.E, rows, K)
                         : scales_of_rows({kExpand, "scale"}, scale, kFrom, q.sizes, 1, rows, K, kNoGroups);
  const Call call(kExpand, "q", q);
  Handle out = call.empty(along_tokens ? scales_along_tokens(kTo, rows, K, p.E, 0)
                          : weight     ? scales_of_weight(kTo, p.E, rows, K)
                                       : scales_along_rows(kTo, rows, K, offs ? p.E : kNoGroups),
                          kTo.scale_type);
  if (p.E == 0 && !offs) return results(out);  // of any size
  p.offs = offs && p.E ? offs->as<int>() : nullptr;
  p.out = data<uint8_t>(out);
  MOE_FP8_RUN(call, expand_scales, p);
  return results(out);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(swizzle_scales)
MOE_FP8_REGISTER(unswizzle_scales)
MOE_FP8_REGISTER(expand_scales)
