#include "ops/quantize.h"

#include "ops/leading.h"

namespace moe_fp8 {
namespace {

// Arguments of the quantizers of tokens.
struct Tokens {
  const char* op;
  const Tensor& x;
  std::string_view format;
  const std::optional<Tensor>& indices;
  std::optional<int64_t> top_k, align;
  std::optional<int32_t> dtype;
  std::optional<std::string_view> rounding;
  std::string_view amax = "group";
};

// rowwise takes any leading dimensions: they run as experts with outputs along rows only.
Outputs quantize_leading(const Tokens& t, const Tensor* offs, QuantizeParams& p) {
  const char* op = t.op;
  const Tensor& x = t.x;
  const int64_t count = product(x.sizes, x.dim - 1);
  if (offs) validate_offs(op, *offs, count);
  const Call call(op, "x", x);
  p.out = check_fp8(call, op, t.dtype);
  Outputs o;
  p.q = data<uint8_t>(o.q = call.empty(x.sizes, x.dim, kFp8Dtypes[int(p.out)]));
  p.scale = data(o.scale = call.empty(x.sizes, x.dim - 1, kFloat32));
  const AsRows as_rows(x, count);
  p.x = as_rows.data;
  p.E = as_rows.rows->outer;
  p.rows = p.positions = as_rows.rows->rows;
  p.group_stride = as_rows.rows->outer_stride;
  p.row_stride = as_rows.rows->row_stride;
  p.weight = true;
  run_quantize(call, p);
  return o;
}

Outputs quantize_tokens(const Tokens& t, const Tensor* offs, bool along_rows, bool along_tokens) {
  const char* op = t.op;
  const Tensor& x = t.x;
  QuantizeParams p = {};
  p.format = check_format(op, t.format);
  const Format& f = format_of(p.format);
  p.rounding = check_rounding(op, f, t.rounding);
  p.amax = check_amax(op, f, t.amax);
  p.in = in_type(x);
  p.K = x.sizes[x.dim - 1];
  p.along_rows = along_rows;
  p.along_tokens = along_tokens;
  p.align = f.align;
  check_both_or_none(op, "indices", t.indices.has_value(), "top_k", t.top_k.has_value());
  if (f.block == 0 && !along_tokens && !t.indices) return quantize_leading(t, offs, p);

  check_dims({op, "x"}, x, 2, 2);
  check_limit(op, "x", x.sizes[0], "rows");
  p.x = x.data;
  p.row_stride = x.strides[0];
  p.rows = p.x_rows = x.sizes[0];
  if (t.indices) {
    p.index = check_indices(op, *t.indices, x.sizes[0], *t.top_k);
    p.rows = t.indices->sizes[0];
  }
  if (offs) validate_offs(op, *offs, p.rows, t.indices ? "indices" : "rows");
  const bool grouped = offs && (along_tokens || f.blocked());
  if (grouped) set_groups(p, op, t.indices ? "indices" : "x", *offs, t.align);
  const Call call(op, "x", x);
  p.out = check_fp8(call, op, t.dtype);
  Outputs o = outputs_of(call, p);
  run_quantize(call, p);
  return o;
}

constexpr const char *kRows = "quantize_rows", *kTokens = "quantize_tokens", *kBoth = "quantize_both",
                     *kWeight = "quantize_weight";

}  // namespace

Results<2> quantize_rows_op(const Tensor& x, std::string_view format, const std::optional<Tensor>& offs,
                            const std::optional<Tensor>& indices, std::optional<int64_t> top_k,
                            std::optional<int32_t> dtype, std::optional<std::string_view> rounding) {
  Outputs o = quantize_tokens({kRows, x, format, indices, top_k, std::nullopt, dtype, rounding},
                              offs ? &*offs : nullptr, true, false);
  return results(o.q, o.scale);
}

Results<3> quantize_tokens_op(const Tensor& x, std::string_view format, const Tensor& offs,
                              const std::optional<Tensor>& indices, std::optional<int64_t> top_k,
                              std::optional<int64_t> align, std::optional<int32_t> dtype,
                              std::optional<std::string_view> rounding, std::string_view amax) {
  Outputs o =
      quantize_tokens({kTokens, x, format, indices, top_k, align, dtype, rounding, amax}, &offs, false, true);
  return results(o.q_t, o.scale_t, o.padded_offs);
}

Results<5> quantize_both_op(const Tensor& x, std::string_view format, const Tensor& offs,
                            const std::optional<Tensor>& indices, std::optional<int64_t> top_k,
                            std::optional<int64_t> align, std::optional<int32_t> dtype,
                            std::optional<std::string_view> rounding, std::string_view amax) {
  Outputs o = quantize_tokens({kBoth, x, format, indices, top_k, align, dtype, rounding, amax}, &offs, true, true);
  return results(o.q, o.scale, o.q_t, o.scale_t, o.padded_offs);
}

Results<4> quantize_weight_op(const Tensor& w, std::string_view format, std::optional<int32_t> dtype,
                              std::optional<std::string_view> rounding, std::string_view directions) {
  QuantizeParams p = {};
  p.format = check_format(kWeight, format);
  const Format& f = format_of(p.format);
  p.rounding = check_rounding(kWeight, f, rounding);
  p.in = in_type(w);
  p.x = w.data;
  p.group_stride = w.strides[0];
  p.row_stride = w.strides[1];
  p.E = w.sizes[0];
  p.rows = p.positions = w.sizes[1];
  p.K = w.sizes[2];
  p.weight = true;
  constexpr const char* kDirections[] = {"both", "rows", "transposed"};
  check_choice(kWeight, "directions", directions, kDirections);
  p.along_rows = directions != "transposed";
  p.along_tokens = directions != "rows";
  p.align = f.align;
  const Call call(kWeight, "w", w);
  p.out = check_fp8(call, kWeight, dtype);
  const int64_t row_experts = p.along_rows ? p.E : 0, column_experts = p.along_tokens ? p.E : 0;
  Handle q = call.empty({row_experts, p.rows, p.K}, p.out), q_t = call.empty({column_experts, p.K, p.rows}, p.out);
  Handle scale = call.empty(scales_of_weight(f, row_experts, p.rows, p.K), f.scale_type);
  Handle scale_t = call.empty(scales_of_weight(f, column_experts, p.K, p.rows), f.scale_type);
  p.q = data<uint8_t>(q);
  p.scale = data(scale);
  p.q_t = data<uint8_t>(q_t);
  p.scale_t = data(scale_t);
  run_quantize(call, p);
  return results(q, scale, q_t, scale_t);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(quantize_rows)
MOE_FP8_REGISTER(quantize_tokens)
MOE_FP8_REGISTER(quantize_both)
MOE_FP8_REGISTER(quantize_weight)
