#include "tokens/expert_columns.h"

#include "ops/checks.h"

namespace moe_fp8 {
namespace {

constexpr const char *kTake = "take_expert_columns", *kSpread = "spread_expert_columns";

}  // namespace

Results<1> take_expert_columns_op(const Tensor& x, const Tensor& offs, const Tensor& indices, int64_t top_k) {
  constexpr const Argument &kX = argument(kTake, "x"), &kOffs = argument(kTake, "offs"),
                           &kIndices = argument(kTake, "indices");
  check(kX, x);
  const RowIndex source = check_indices(kIndices, indices, x, x.sizes[0], top_k);
  const int64_t P = indices.sizes[0], columns = x.sizes[1];
  check_offs(kOffs, offs, x, P, "indices");
  const int64_t E = offs.sizes[0];
  if (E == 0 ? columns != 0 : columns % E != 0)
    fail(kTake, ": x must have as many columns for each of the ", E, " groups, got ", columns);
  const Call call(kTake, "x", x);
  const int64_t R = E ? columns / E : 0, bytes = int64_t(aoti_torch_dtype_element_size(x.dtype));
  Handle out = call.empty({P, R}, x.dtype);
  const TakeExpertColumnsParams p = {x.data, offs.as<int>(), source, data(out), P, E, R * bytes, x.strides[0] * bytes};
  MOE_FP8_RUN(call, take_expert_columns, p);
  return results(out);
}

Results<1> spread_expert_columns_op(const Tensor& y, const Tensor& offs, const Tensor& inverse,
                                    const std::optional<Tensor>& topk_scores) {
  constexpr const Argument &kY = argument(kSpread, "y"), &kOffs = argument(kSpread, "offs"),
                           &kInverse = argument(kSpread, "inverse"), &kScores = argument(kSpread, "topk_scores");
  check(kY, y);
  const int64_t P = y.sizes[0], R = y.sizes[1];
  check_offs(kOffs, offs, y, P);
  check(kInverse, inverse, y);
  if (topk_scores) {
    check(kScores, *topk_scores, y);
    check_sizes(kScores, *topk_scores, inverse.sizes, 2);
  }
  validate_range(kInverse, inverse, P, "rows of y");
  const Call call(kSpread, "y", y);
  const int64_t T = inverse.sizes[0], E = offs.sizes[0];
  Handle out = call.empty({T, E * R}, y.dtype);
  const SpreadExpertColumnsParams p = {y.data, offs.as<int>(), inverse.as<int>(),
                                       topk_scores ? topk_scores->as<float>() : nullptr, data(out), T,
                                       inverse.sizes[1], P, E, R, y.strides[0], in_type(y)};
  MOE_FP8_RUN(call, spread_expert_columns, p);
  return results(out);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(take_expert_columns)
MOE_FP8_REGISTER(spread_expert_columns)
