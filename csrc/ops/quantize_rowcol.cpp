#include "kernels/quantize_rowcol.h"

#include "ops/common.h"
#include "ops/cpu_loops.h"

namespace moe_fp8 {

Results<5> quantize_rowcol_op(const Tensor& x, const Tensor& offs, int64_t align, std::optional<int32_t> dtype,
                              bool pow2_scale) {
  constexpr const char* kOp = "quantize_rowcol";
  const InType in = in_type(kOp, "x", x);
  check_dim(kOp, "x", x, 2);
  check_inner_stride(kOp, "x", x);
  const int64_t M = x.sizes[0], K = x.sizes[1], row_stride = x.strides[0];
  check_size(kOp, "x", K, "columns");
  check_offs(kOp, offs, "x", x, M);
  const int64_t E = offs.sizes[0], P = check_align(kOp, align, "x", M, E);
  const Call call(kOp, "x", x);
  const Fp8Type out = call.out_type(dtype);

  Handle q = call.empty({M, K}, out), scale = call.empty({M}, kFloat32);
  Handle q_t = call.empty({K, P}, out), scale_t = call.empty({E, K}, kFloat32), padded_offs = call.empty({E}, kInt32);

#if defined(MOE_FP8_GPU)
  if (x.on_gpu()) {
    call.check(quantize_rowcol({x.data, offs.as<int>(), data<uint8_t>(q), data<float>(scale), data<uint8_t>(q_t),
                                data<float>(scale_t), data<int>(padded_offs), E, M, K, row_stride, 0, P, int(align),
                                in, out, pow2_scale}, call.stream()));
    return results(q, scale, q_t, scale_t, padded_offs);
  }
#endif
  std::memset(data(q_t), 0, K * P);
  const auto groups = token_groups(offs.as<int>(), E, M, align, K, data<int>(padded_offs));
  dispatch(in, out, [&](auto in_tag, auto out_tag) {
    using In = decltype(in_tag);
    constexpr Fp8Type kOut = decltype(out_tag)::value;
    const TokenRows<typename In::Bits> rows = {x.as<typename In::Bits>(), row_stride};
    rowwise_loop<In, kOut>(rows, M, K, pow2_scale, data<uint8_t>(q), data<float>(scale));
    colwise_loop<In, kOut>(rows, groups, K, pow2_scale, data<uint8_t>(q_t), P, data<float>(scale_t));
    return 0;
  });
  return results(q, scale, q_t, scale_t, padded_offs);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(quantize_rowcol)
