#include "tokens/quantize_and_pack.h"

#include "ops/quantize.h"

namespace moe_fp8 {
namespace {

constexpr const char *kPack = "pack_tokens", *kQuantize = "quantize_and_pack";

void add_column(PackTokensParams& p, const Tensor& t, bool ids = false) {
  const bool matrix = t.dim == 2;
  p.add({t.data, element_size(t.dtype), t.strides[0], matrix ? t.strides[1] : 1, matrix ? t.sizes[1] : 1, ids});
}
// Checks an optional tensor that has a row for each row of x.
void check_per_row(Name arg, const std::optional<Tensor>& t, const Tensor& x) {
  if (t) check_size(arg, *t, 0, x.sizes[0]);
}
void check_routing(const char* op, const std::optional<Tensor>& ids, const std::optional<Tensor>& scores,
                   int64_t num_experts, const Tensor& x) {
  check_per_row({op, "topk_ids"}, ids, x);
  check_per_row({op, "topk_scores"}, scores, x);
  check_count(op, "num_experts", num_experts);
  if (ids) validate_ids({op, "topk_ids"}, *ids, num_experts);
}
// Checks that inverse and indices agree: each has the places of the other. Both are read once, because others may write
// to them.
void validate_inverse(const char* op, const Tensor& inverse, const Tensor& indices) {
  if (!validates()) return;
  const Name inverse_arg = {op, "inverse"}, indices_arg = {op, "indices"};
  const std::vector<int> rows = contents(inverse), slots = contents(indices);
  validate_range(inverse_arg, rows, int64_t(slots.size()), "rows");
  validate_range(indices_arg, slots, int64_t(rows.size()), "slots");
  const auto validate = [&](Name arg, const std::vector<int>& places, Name other,
                            const std::vector<int>& back) {
    for (size_t p = 0; p < places.size(); ++p)
      if (places[p] >= 0 && back[size_t(places[p])] != int(p))
        fail(arg.op, ": ", arg.arg, " must agree with ", other.arg, ", got ", places[p], " in place ", p,
             " where ", other.arg, " has ", back[size_t(places[p])], " in place ", places[p]);
  };
  validate(inverse_arg, rows, indices_arg, slots);
  validate(indices_arg, slots, inverse_arg, rows);
}
// Adds the columns of rows that a quantizer writes: values, then scales.
void add_quantized(PackTokensParams& p, const QuantizeParams& x) {
  const Format& f = format_of(x.format);
  const ScaleShape scale = scales_along_rows(f, x.rows, x.K, kNoGroups);
  const bool by_column = scale.column_stride >= 0;
  const int64_t blocks = f.blocks(x.K), size = element_size(scale_dtype(f.scale_type));
  p.add({x.q, 1, x.K, 1, x.K});
  p.add({x.scale, size, by_column ? 1 : blocks, by_column ? scale.column_stride : 1, blocks});
}
// Adds the last columns of a row: ids and scores.
void add_routing(PackTokensParams& p, const std::optional<Tensor>& ids, const std::optional<Tensor>& scores,
                 int64_t num_experts) {
  if (ids) add_column(p, *ids, true);
  if (scores) add_column(p, *scores);
  p.num_experts = int(num_experts);
  p.end_row();
}

}  // namespace

Results<1> pack_tokens_op(const Tensor& x, const std::optional<Tensor>& topk_ids,
                          const std::optional<Tensor>& topk_scores, const std::optional<Tensor>& scale,
                          const Tensor& indices, int64_t top_k, int64_t num_experts) {
  PackTokensParams p = {};
  p.source = check_indices(kPack, indices, x.sizes[0], top_k);
  check_per_row({kPack, "scale"}, scale, x);
  check_routing(kPack, topk_ids, topk_scores, num_experts, x);
  add_column(p, x);
  if (scale) add_column(p, *scale);
  add_routing(p, topk_ids, topk_scores, num_experts);
  p.rows = indices.sizes[0];
  const Call call(kPack, "x", x);
  Handle out = call.empty({p.rows, p.row_bytes}, kUInt8);
  p.to = data(out);
  MOE_FP8_RUN(call, pack_tokens, p);
  return results(out);
}

Results<1> quantize_and_pack_op(const Tensor& x, const std::optional<Tensor>& topk_ids,
                                const std::optional<Tensor>& topk_scores, std::string_view format,
                                const Tensor& indices, const Tensor& inverse, int64_t num_experts,
                                std::optional<int32_t> dtype, std::optional<std::string_view> rounding) {
  QuantizeAndPackParams p = {};
  QuantizeParams& quantizer = p.quantize_x;
  quantizer.format = check_format(kQuantize, format);
  quantizer.rounding = check_rounding(kQuantize, format_of(quantizer.format), rounding);
  // In a message, the scales of a token lie side by side.
  if (format_of(quantizer.format).blocked()) quantizer.format = FormatId::kMxfp8RowMajor;
  quantizer.in = in_type(x);
  quantizer.x = x.data;
  quantizer.row_stride = x.strides[0];
  quantizer.rows = quantizer.x_rows = x.sizes[0];
  quantizer.K = x.sizes[1];
  quantizer.along_rows = true;
  check_size({kQuantize, "inverse"}, inverse, 0, quantizer.rows);
  p.top_k = inverse.sizes[1];
  PackTokensParams& rows = p.rows;
  const int64_t rows_of_x = p.top_k ? quantizer.rows : 0, top_k = p.top_k ? p.top_k : 1;
  rows.source = check_indices(kQuantize, indices, rows_of_x, top_k);
  rows.inverse = inverse.as<int>();
  rows.rows = indices.sizes[0];
  validate_inverse(kQuantize, inverse, indices);
  const Call call(kQuantize, "x", x);
  quantizer.out = check_fp8(call, kQuantize, dtype);
  check_routing(kQuantize, topk_ids, topk_scores, num_experts, x);

  bool fused = false;  // one kernel casts and packs: q and scale are in messages only
  if constexpr (kGpuBuild) fused = call.on_gpu() && can_quantize_and_pack(p);
  const Outputs o = fused ? Outputs{} : outputs_of(call, quantizer);
  add_quantized(rows, quantizer);
  add_routing(rows, topk_ids, topk_scores, num_experts);
  Handle out = call.empty({rows.rows, rows.row_bytes}, kUInt8);
  rows.to = data(out);
  if constexpr (kGpuBuild) {
    if (fused) {
      call.check(quantize_and_pack(p, call.stream()));
      return results(out);
    }
  }
  run_quantize(call, quantizer);
  MOE_FP8_RUN(call, pack_tokens, rows);
  return results(out);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(pack_tokens)
MOE_FP8_REGISTER(quantize_and_pack)
