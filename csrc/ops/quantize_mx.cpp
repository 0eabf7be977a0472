#include "ops/quantize_mx.h"

namespace moe_fp8 {
namespace {

QuantizeMxParams checked_tokens(const char* op, const Tensor& x, const std::string& scaling,
                                const std::string& layout) {
  const InType in = check_tokens(op, "x", x);
  return mx_tokens(op, x, in, x.sizes[0], scaling, layout);
}
MxOutputs quantize(const Call& call, QuantizeMxParams& p, const Tensor& x, std::optional<int32_t> dtype, bool rowwise,
                   bool columnwise, bool grouped) {
  p.out = call.out_type(dtype);
  return quantize_mx_tokens(call, p, rowwise, columnwise, grouped, x.on_gpu(), [&](auto in) {
    return TokenRows<typename decltype(in)::Bits>{x.as<typename decltype(in)::Bits>(), x.strides[0]};
  });
}

// scales and scales_t: bytes of an expert.
template <class In, Fp8Type kOut>
void loop_weight(const QuantizeMxParams& p, int64_t scales, int64_t scales_t) {
  using Bits = typename In::Bits;
  const int64_t N = p.rows, K = p.K, columns = padded_scale_columns(ceil_div<int64_t>(K, kMxBlock));
  const int64_t columns_t = padded_scale_columns(ceil_div<int64_t>(N, kMxBlock));
  auto row_of = [=, w = static_cast<const Bits*>(p.x)](int64_t row, int64_t more = 0) {  // of all experts
    return w + (row + more) / N * p.group_stride + (row + more) % N * p.row_stride;
  };
  loop_1x32<In, kOut>(row_of, p.E * N, K, p.floor, p.q, [=](int64_t row, int64_t block, uint8_t e) {
    ScaleMatrix{p.scale + row / N * scales, columns, true}.at(row % N, block) = e;
  });
  MxColumns of_experts;
  for (int64_t e = 0; e < p.E; ++e)
    of_experts.add({e * N, N, e * K * N, 0}, {p.scale_t + e * scales_t, columns_t, true});
  loop_32x1<In, kOut>(row_of, of_experts, K, p.floor, p.q_t, N);
}

}  // namespace

Results<2> quantize_mx_1x32_op(const Tensor& x, const std::string& scaling, const std::string& layout,
                               const std::optional<Tensor>& offs, std::optional<int32_t> dtype) {
  constexpr const char* kOp = "quantize_mx_1x32";
  QuantizeMxParams p = checked_tokens(kOp, x, scaling, layout);
  if (offs && !p.blocked) fail_groups_of_rowmajor(kOp);
  if (offs) mx_groups(kOp, p, "x", x, *offs, kMxBlock);
  MxOutputs o = quantize(Call(kOp, "x", x), p, x, dtype, true, false, offs.has_value());
  return results(o.q, o.scale);
}

Results<3> quantize_mx_32x1_op(const Tensor& x, const Tensor& offs, const std::string& scaling,
                               const std::string& layout, int64_t align, std::optional<int32_t> dtype) {
  constexpr const char* kOp = "quantize_mx_32x1";
  QuantizeMxParams p = checked_tokens(kOp, x, scaling, layout);
  mx_groups(kOp, p, "x", x, offs, align);
  MxOutputs o = quantize(Call(kOp, "x", x), p, x, dtype, false, true, true);
  return results(o.q_t, o.scale_t, o.padded_offs);
}

Results<5> quantize_mx_1x32_32x1_op(const Tensor& x, const Tensor& offs, const std::string& scaling,
                                    const std::string& layout, int64_t align, std::optional<int32_t> dtype) {
  constexpr const char* kOp = "quantize_mx_1x32_32x1";
  QuantizeMxParams p = checked_tokens(kOp, x, scaling, layout);
  mx_groups(kOp, p, "x", x, offs, align);
  MxOutputs o = quantize(Call(kOp, "x", x), p, x, dtype, true, true, true);
  return results(o.q, o.scale, o.q_t, o.scale_t, o.padded_offs);
}

Results<4> quantize_mx_weight_op(const Tensor& w, const std::string& scaling, std::optional<int32_t> dtype) {
  constexpr const char* kOp = "quantize_mx_weight";
  QuantizeMxParams p = {};
  p.in = check_experts(kOp, "w", w);
  p.floor = is_floor(kOp, scaling);
  p.x = w.data;
  p.E = w.sizes[0];
  p.rows = p.positions = w.sizes[1];
  p.K = w.sizes[2];
  p.group_stride = w.strides[0];
  p.row_stride = w.strides[1];
  p.align = kMxBlock;
  p.blocked = true;
  const Call call(kOp, "w", w);
  p.out = call.out_type(dtype);
  auto scales_of = [](int64_t rows, int64_t size) {
    return padded_scale_rows(rows) * padded_scale_columns(ceil_div<int64_t>(size, kMxBlock));
  };
  const int64_t scales = scales_of(p.rows, p.K), scales_t = scales_of(p.K, p.rows);  // of an expert
  Handle q = call.empty({p.E, p.rows, p.K}, p.out), scale = call.empty({p.E, scales}, kE8M0);
  Handle q_t = call.empty({p.E, p.K, p.rows}, p.out), scale_t = call.empty({p.E, scales_t}, kE8M0);
  p.q = data<uint8_t>(q);
  p.scale = data<uint8_t>(scale);
  p.q_t = data<uint8_t>(q_t);
  p.scale_t = data<uint8_t>(scale_t);
#if defined(MOE_FP8_GPU)
  if (w.on_gpu()) {
    call.check(quantize_mx_weight(p, call.stream()));
    return results(q, scale, q_t, scale_t);
  }
#endif
  std::memset(p.scale, 0, p.E * scales);
  std::memset(p.scale_t, 0, p.E * scales_t);
  dispatch(p.in, p.out, [&](auto in_tag, auto out_tag) {
    loop_weight<decltype(in_tag), decltype(out_tag)::value>(p, scales, scales_t);
    return 0;
  });
  return results(q, scale, q_t, scale_t);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(quantize_mx_1x32)
MOE_FP8_REGISTER(quantize_mx_32x1)
MOE_FP8_REGISTER(quantize_mx_1x32_32x1)
MOE_FP8_REGISTER(quantize_mx_weight)
