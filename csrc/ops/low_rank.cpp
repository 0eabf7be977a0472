#include "low_rank/tokens.h"

#include "ops/operands.h"

namespace moe_fp8 {
namespace {

constexpr const char *kNarrow = "narrow_tokens", *kOuter = "outer_tokens";

// x [T, W] in bfloat16, or in FP8 with the scales and the format of `quantize_rows`.
TokenRows check_tokens(const char* op, const Tensor& x, const std::optional<Tensor>& x_scale,
                       std::optional<std::string_view> format) {
  check_both_or_none(op, "x_scale", x_scale.has_value(), "format", format.has_value());
  check_dtypes({op, "x"}, x_scale ? Dtypes::kFp8 : Dtypes::kBFloat16, x.dtype);
  if (!x_scale) return {x.data, x.strides[0]};
  const Format& f = format_of(FormatId(check_choice(op, "format", *format, 2, [](int i) { return kFormats[i].name; })));
  static_assert(kFormats[0].scale_type == ScaleType::kF32 && kFormats[1].scale_type == ScaleType::kF32);
  return {x.data, x.strides[0], true, fp8_type(x),
          scales_of_rows({op, "x_scale"}, *x_scale, f, x.sizes, 1, x.sizes[0], x.sizes[1], kNoGroups)};
}

}  // namespace

Results<1> narrow_tokens_op(const Tensor& x, const Tensor& m, const Tensor& offs, const std::optional<Tensor>& x_scale,
                            std::optional<std::string_view> format, const std::optional<Tensor>& indices,
                            std::optional<int64_t> top_k) {
  const int64_t E = m.sizes[0], R = m.sizes[1], W = m.sizes[2];
  const TokenRows tokens = check_tokens(kNarrow, x, x_scale, format);
  const SortedRows rows = check_rows(kNarrow, x, indices, top_k);
  check_size({kNarrow, "x"}, x, 1, W);
  check_size({kNarrow, "offs"}, offs, 0, E);
  validate_offs(kNarrow, offs, rows.count, indices ? "indices" : "rows");
  const Call call(kNarrow, "x", x);
  Handle out = call.empty({rows.count, R}, kBFloat16);
  const NarrowTokensParams p = {tokens, m.as<uint16_t>(), ints(offs), rows.source, data<uint16_t>(out),
                                rows.count, E, R, W, m.strides[0], m.strides[1]};
  MOE_FP8_RUN(call, narrow_tokens, p);
  return results(out);
}

Results<1> outer_tokens_op(const Tensor& u, const Tensor& x, const Tensor& offs, const std::optional<Tensor>& scores,
                           const std::optional<Tensor>& x_scale, std::optional<std::string_view> format,
                           const std::optional<Tensor>& indices, std::optional<int64_t> top_k,
                           std::optional<int32_t> out_dtype) {
  const int64_t P = u.sizes[0], R = u.sizes[1], W = x.sizes[1], E = offs.sizes[0];
  const TokenRows tokens = check_tokens(kOuter, x, x_scale, format);
  const SortedRows rows = check_rows(kOuter, x, indices, top_k);
  check_size({kOuter, "u"}, u, 0, rows.count);
  if (scores) {
    const int64_t count = product(scores->sizes, scores->dim);
    if (count != rows.slots) fail(kOuter, ": scores must have ", rows.slots, " elements, got ", count);
  }
  const int32_t dtype = out_dtype.value_or(kBFloat16);
  check_dtypes({kOuter, "out_dtype"}, Dtypes::kProduct, dtype);
  validate_offs(kOuter, offs, P);
  const Call call(kOuter, "u", u);
  Handle out = call.empty({E, R, W}, dtype);
  const OuterTokensParams p = {u.as<uint16_t>(), tokens, ints(offs), rows.source,
                               scores ? scores->as<float>() : nullptr, data(out), P, E, R, W,
                               u.strides[0], dtype == kFloat32};
  MOE_FP8_RUN(call, outer_tokens, p);
  return results(out);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(narrow_tokens)
MOE_FP8_REGISTER(outer_tokens)
