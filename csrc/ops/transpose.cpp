#include "ops/checks.h"
#include "quantize/transpose_weight.h"

namespace moe_fp8 {

Results<1> transpose_weight_op(const Tensor& q) {
  constexpr const char* kOp = "transpose_weight";
  const Call call(kOp, "q", q);
  const int64_t E = q.sizes[0], N = q.sizes[1], K = q.sizes[2];
  Handle q_t = call.empty({E, K, N}, q.dtype);
  const TransposeWeightParams p = {q.as<uint8_t>(), data<uint8_t>(q_t), E, N, K, q.strides[0], q.strides[1]};
  MOE_FP8_RUN(call, transpose_weight, p);
  return results(q_t);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(transpose_weight)
