#include "kernels/quantize_rowcol.h"
#include "ops/common.h"
#include "ops/cpu_loops.h"

namespace moe_fp8 {

Results<4> quantize_weight_op(const Tensor& w, std::optional<int32_t> dtype, bool pow2_scale) {
  constexpr const char* kOp = "quantize_weight";
  const InType in = check_experts(kOp, "w", w);
  const int64_t E = w.sizes[0], N = w.sizes[1], K = w.sizes[2], group_stride = w.strides[0], row_stride = w.strides[1];
  const Call call(kOp, "w", w);
  const Fp8Type out = call.out_type(dtype);

  Handle q = call.empty({E, N, K}, out), scale = call.empty({E, N}, kFloat32);
  Handle q_t = call.empty({E, K, N}, out), scale_t = call.empty({E, K}, kFloat32);

#if defined(MOE_FP8_GPU)
  if (w.on_gpu()) {
    call.check(quantize_weight({w.data, nullptr, data<uint8_t>(q), data<float>(scale), data<uint8_t>(q_t),
                                data<float>(scale_t), nullptr, E, N, K, row_stride, group_stride, N, 1, in, out,
                                pow2_scale}, call.stream()));
    return results(q, scale, q_t, scale_t);
  }
#endif
  std::vector<GroupRows> groups(E);
  for (int64_t e = 0; e < E; ++e) groups[e] = {e * group_stride, N, e * K * N, e * K};
  dispatch(in, out, [&](auto in_tag, auto out_tag) {
    using In = decltype(in_tag);
    constexpr Fp8Type kOut = decltype(out_tag)::value;
    const auto* base = w.as<typename In::Bits>();
    auto row_of = [=](int64_t r) { return base + r / N * group_stride + r % N * row_stride; };
    rowwise_loop<In, kOut>(row_of, E * N, K, pow2_scale, data<uint8_t>(q), data<float>(scale));
    auto row_of_expert = [=](int64_t first, int64_t r) { return base + first + r * row_stride; };
    colwise_loop<In, kOut>(row_of_expert, groups, K, pow2_scale, data<uint8_t>(q_t), N, data<float>(scale_t));
    return 0;
  });
  return results(q, scale, q_t, scale_t);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(quantize_weight)
