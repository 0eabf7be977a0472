#include "tokens/expert_columns.h"

#include "ops/checks.h"

namespace moe_fp8 {
namespace {

constexpr const char *kTake = "take_expert_columns", *kSpread = "spread_expert_columns";

}  // namespace

Results<1> take_expert_columns_op(const Tensor& x, const Tensor& offs, const Tensor& indices, int64_t top_k) {
  const RowIndex source = check_indices(kTake, indices, x.sizes[0], top_k);
  const int64_t P = indices.sizes[0], E = offs.sizes[0], columns = x.sizes[1];
  validate_offs(kTake, offs, P, "indices");
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
  const int64_t P = y.sizes[0], R = y.sizes[1], T = inverse.sizes[0], E = offs.sizes[0];
  validate_offs(kSpread, offs, P);
  if (topk_scores) check_sizes({kSpread, "topk_scores"}, *topk_scores, inverse.sizes, 2);
  validate_range({kSpread, "inverse"}, inverse, P, "rows of y");
  const Call call(kSpread, "y", y);
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
