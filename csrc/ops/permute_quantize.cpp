#include "kernels/permute_quantize.h"

#include "ops/common.h"
#include "ops/cpu_loops.h"
#include "ops/permute.h"
#include "ops/quantize_blockwise.h"
#include "ops/quantize_mx.h"

namespace moe_fp8 {

Results<2> permute_pad_quantize_rowwise_op(const Tensor& x, const Tensor& indices, int64_t top_k,
                                           std::optional<int32_t> dtype, bool pow2_scale) {
  constexpr const char* kOp = "permute_pad_quantize_rowwise";
  const InType in = check_tokens(kOp, "x", x);
  const RowIndex index = check_indices(kOp, indices, "x", x, x.sizes[0], top_k);
  const int64_t P = indices.sizes[0], K = x.sizes[1];
  const Call call(kOp, "x", x);
  const Fp8Type out = call.out_type(dtype);
  Handle q = call.empty({P, K}, out), scale = call.empty({P}, kFloat32);

#if defined(MOE_FP8_GPU)
  if (x.on_gpu()) {
    QuantizeRowwiseParams p = {x.data, data(q), data<float>(scale), 1, P, K, 0, x.strides[0], in, out,
                               pow2_scale};
    p.index = index;
    call.check(permute_pad_quantize_rowwise(p, call.stream()));
    return results(q, scale);
  }
#endif
  const std::vector<uint32_t> zeros(K);
  dispatch(in, out, [&](auto in_tag, auto out_tag) {
    using In = decltype(in_tag);
    rowwise_loop<In, decltype(out_tag)::value>(indexed_rows<typename In::Bits>(x, index, zeros), P, K, pow2_scale,
                                               data<uint8_t>(q), data<float>(scale));
    return 0;
  });
  return results(q, scale);
}

Results<5> permute_pad_quantize_rowcol_op(const Tensor& x, const Tensor& indices, const Tensor& offs, int64_t top_k,
                                          int64_t align, std::optional<int32_t> dtype, bool pow2_scale) {
  constexpr const char* kOp = "permute_pad_quantize_rowcol";
  const InType in = check_tokens(kOp, "x", x);
  const RowIndex index = check_indices(kOp, indices, "x", x, x.sizes[0], top_k);
  const int64_t M = indices.sizes[0], K = x.sizes[1];
  check_offs(kOp, offs, "x", x, M, "indices");
  const int64_t E = offs.sizes[0], P = check_align(kOp, align, "indices", M, E);
  const Call call(kOp, "x", x);
  const Fp8Type out = call.out_type(dtype);
  Handle q = call.empty({M, K}, out), scale = call.empty({M}, kFloat32);
  Handle q_t = call.empty({K, P}, out), scale_t = call.empty({E, K}, kFloat32), padded_offs = call.empty({E}, kInt32);

#if defined(MOE_FP8_GPU)
  if (x.on_gpu()) {
    QuantizeRowcolParams p = {x.data, offs.as<int>(), data<uint8_t>(q), data<float>(scale), data<uint8_t>(q_t),
                              data<float>(scale_t), data<int>(padded_offs), E, M, K, x.strides[0], 0, P,
                              int(align), in, out, pow2_scale};
    p.index = index;
    call.check(permute_pad_quantize_rowcol(p, call.stream()));
    return results(q, scale, q_t, scale_t, padded_offs);
  }
#endif
  std::memset(data(q_t), 0, K * P);
  const auto groups = token_groups(offs.as<int>(), E, M, align, K, data<int>(padded_offs));
  const std::vector<uint32_t> zeros(K);
  dispatch(in, out, [&](auto in_tag, auto out_tag) {
    using In = decltype(in_tag);
    constexpr Fp8Type kOut = decltype(out_tag)::value;
    const auto rows = indexed_rows<typename In::Bits>(x, index, zeros);
    rowwise_loop<In, kOut>(rows, M, K, pow2_scale, data<uint8_t>(q), data<float>(scale));
    colwise_loop<In, kOut>(rows, groups, K, pow2_scale, data<uint8_t>(q_t), P, data<float>(scale_t));
    return 0;
  });
  return results(q, scale, q_t, scale_t, padded_offs);
}

namespace {

// Of both blockwise ops; without offs, rows alone.
BlockwiseOutputs permute_pad_quantize_blockwise(const char* op, const Tensor& x, const Tensor& indices,
                                                const Tensor* offs, int64_t top_k, int64_t align,
                                                std::optional<int32_t> dtype, bool pow2_scale, bool transpose) {
  const InType in = check_tokens(op, "x", x);
  const RowIndex index = check_indices(op, indices, "x", x, x.sizes[0], top_k);
  QuantizeBlockwiseParams p = of_tokens(x, in, indices.sizes[0], pow2_scale);
  p.index = index;
  if (offs) group(op, p, "indices", x, *offs, align, transpose);
  const Call call(op, "x", x);
  p.out = call.out_type(dtype);
  const std::vector<uint32_t> zeros(x.on_gpu() ? 0 : p.K);
  return quantize_tokens(call, p, true, offs != nullptr, x.on_gpu(), [&](auto in) {
    return indexed_rows<typename decltype(in)::Bits>(x, p.index, zeros);
  });
}

}  // namespace

Results<2> permute_pad_quantize_1x128_op(const Tensor& x, const Tensor& indices, int64_t top_k,
                                         std::optional<int32_t> dtype, bool pow2_scale) {
  BlockwiseOutputs o = permute_pad_quantize_blockwise("permute_pad_quantize_1x128", x, indices, nullptr, top_k, 1,
                                                      dtype, pow2_scale, true);
  return results(o.q, o.scale);
}

Results<5> permute_pad_quantize_1x128_128x1_op(const Tensor& x, const Tensor& indices, const Tensor& offs,
                                               int64_t top_k, int64_t align, std::optional<int32_t> dtype,
                                               bool pow2_scale, bool transpose) {
  BlockwiseOutputs o = permute_pad_quantize_blockwise("permute_pad_quantize_1x128_128x1", x, indices, &offs, top_k,
                                                      align, dtype, pow2_scale, transpose);
  return results(o.q, o.scale, o.q_t, o.scale_t, o.padded_offs);
}

namespace {

// Of both MX ops: rows, or both directions.
MxOutputs permute_pad_quantize_mx(const char* op, const Tensor& x, const Tensor& indices, const Tensor* offs,
                                  int64_t top_k, const std::string& scaling, const std::string& layout, int64_t align,
                                  std::optional<int32_t> dtype, bool columnwise) {
  const InType in = check_tokens(op, "x", x);
  const RowIndex index = check_indices(op, indices, "x", x, x.sizes[0], top_k);
  QuantizeMxParams p = mx_tokens(op, x, in, indices.sizes[0], scaling, layout);
  p.index = index;
  if (offs && !columnwise && !p.blocked) fail_groups_of_rowmajor(op);
  if (offs) mx_groups(op, p, "indices", x, *offs, align);
  const Call call(op, "x", x);
  p.out = call.out_type(dtype);
  const std::vector<uint32_t> zeros(x.on_gpu() ? 0 : p.K);
  return quantize_mx_tokens(call, p, true, columnwise, offs != nullptr, x.on_gpu(), [&](auto in_tag) {
    return indexed_rows<typename decltype(in_tag)::Bits>(x, p.index, zeros);
  });
}

}  // namespace

Results<2> permute_pad_quantize_mx_1x32_op(const Tensor& x, const Tensor& indices, const std::optional<Tensor>& offs,
                                           int64_t top_k, const std::string& scaling, const std::string& layout,
                                           std::optional<int32_t> dtype) {
  constexpr const char* kOp = "permute_pad_quantize_mx_1x32";
  MxOutputs o = permute_pad_quantize_mx(kOp, x, indices, offs ? &*offs : nullptr, top_k, scaling, layout, kMxBlock,
                                        dtype, false);
  return results(o.q, o.scale);
}

Results<5> permute_pad_quantize_mx_1x32_32x1_op(const Tensor& x, const Tensor& indices, const Tensor& offs,
                                                int64_t top_k, const std::string& scaling, const std::string& layout,
                                                int64_t align, std::optional<int32_t> dtype) {
  MxOutputs o = permute_pad_quantize_mx("permute_pad_quantize_mx_1x32_32x1", x, indices, &offs, top_k, scaling, layout,
                                        align, dtype, true);
  return results(o.q, o.scale, o.q_t, o.scale_t, o.padded_offs);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(permute_pad_quantize_rowwise)
MOE_FP8_REGISTER(permute_pad_quantize_rowcol)
MOE_FP8_REGISTER(permute_pad_quantize_1x128)
MOE_FP8_REGISTER(permute_pad_quantize_1x128_128x1)
MOE_FP8_REGISTER(permute_pad_quantize_mx_1x32)
MOE_FP8_REGISTER(permute_pad_quantize_mx_1x32_32x1)
