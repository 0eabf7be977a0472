#include "scales/dequantize.h"

#include "ops/leading.h"
#include "ops/operands.h"

namespace moe_fp8 {
namespace {

constexpr const char* kOp = "dequantize";

}  // namespace

Results<1> dequantize_op(const Tensor& q, const Tensor& scale, std::string_view format, std::string_view along,
                         const std::optional<Tensor>& offs, std::optional<int32_t> out_dtype) {
  const FormatId id = check_format(kOp, format);
  const Format& f = format_of(id);
  const bool along_tokens = check_along_tokens(kOp, along, q, offs.has_value());
  if (!along_tokens && f.order != ScaleOrder::kRowMajor) check_dims({kOp, "q"}, q, 2, 3);
  const int32_t out_type = out_dtype.value_or(kBFloat16);
  check_dtypes({kOp, "out_dtype"}, Dtypes::kInput, out_type);

  DequantizeParams p = {};
  p.type = fp8_type(q);
  p.out_type = in_type(out_type);
  p.K = q.sizes[q.dim - 1];
  const int64_t count = product(q.sizes, q.dim - 1);
  if (offs) {
    const int64_t extent = along_tokens ? p.K : count;
    validate_offs(kOp, *offs, extent, along_tokens ? "columns" : "rows");
    p.groups = along_tokens ? Groups::kColumns : f.blocked() && q.dim == 2 ? Groups::kRows : Groups::kNone;
    if (p.groups != Groups::kNone) {
      p.offs = offs->as<int>();
      p.num_groups = int(offs->sizes[0]);
      if (f.block)
        check_extent(kOp, "q", extent, p.num_groups, kGroupScales,
                     along_tokens ? "columns with padding" : "rows with padding");
    }
  }
  const bool any_dims = !along_tokens && f.order == ScaleOrder::kRowMajor;
  if (!any_dims) check_limit(kOp, "q", q.sizes[q.dim - 2], "rows");

  const Call call(kOp, "q", q);
  Handle out = call.empty(q.sizes, q.dim, out_type);
  p.q = q.as<uint8_t>();
  std::optional<AsRows> as_rows;  // may hold a copy
  if (any_dims) {
    as_rows.emplace(q, count);
    const LeadingRows& rows = *as_rows->rows;
    p.q = static_cast<const uint8_t*>(as_rows->data);
    p.E = rows.outer;
    p.rows = rows.rows;
    p.group_stride = rows.outer_stride;
    p.row_stride = rows.row_stride;
    p.scale = scales_of_rows({kOp, "scale"}, scale, f, q.sizes, q.dim - 1, p.rows, p.K, kNoGroups);
  } else {
    const bool weight = q.dim == 3;
    p.E = weight ? q.sizes[0] : 1;
    p.rows = q.sizes[q.dim - 2];
    p.group_stride = weight ? q.strides[0] : 0;
    p.row_stride = q.strides[q.dim - 2];
    if (along_tokens) p.scale = scales_of_tokens({kOp, "scale"}, scale, f, p.rows, p.K, *offs);
    else if (weight) p.scale = scales_of_experts({kOp, "scale"}, scale, f, p.E, p.rows, p.K);
    else
      p.scale = scales_of_rows({kOp, "scale"}, scale, f, q.sizes, 1, p.rows, p.K,
                               p.groups == Groups::kRows ? p.num_groups : kNoGroups);
  }
  p.out = data(out);
  MOE_FP8_RUN(call, dequantize, p);
  return results(out);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(dequantize)
