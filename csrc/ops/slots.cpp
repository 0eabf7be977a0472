#include "tokens/combine.h"

#include "ops/checks.h"

namespace moe_fp8 {
namespace {

constexpr const char *kCombine = "combine", *kBackward = "combine_backward";

}  // namespace

Results<1> combine_op(const Tensor& y, const Tensor& inverse, const std::optional<Tensor>& topk_scores) {
  if (topk_scores) check_sizes({kCombine, "topk_scores"}, *topk_scores, inverse.sizes, 2);
  validate_range({kCombine, "inverse"}, inverse, y.sizes[0], "rows of y");
  const Call call(kCombine, "y", y);
  const int64_t T = inverse.sizes[0], P = y.sizes[0], K = y.sizes[1];
  Handle out = call.empty({T, K}, y.dtype);
  const CombineParams p = {y.data, inverse.as<int>(), topk_scores ? topk_scores->data : nullptr, data(out), T,
                           inverse.sizes[1], P, K, y.strides[0], in_type(y),
                           topk_scores && topk_scores->dtype == kFloat32};
  MOE_FP8_RUN(call, combine, p);
  return results(out);
}

Results<2> combine_backward_op(const Tensor& grad, const std::optional<Tensor>& y,
                               const std::optional<Tensor>& topk_scores, const Tensor& inverse, int64_t num_rows,
                               bool keep_grad_y) {
  const int64_t T = inverse.sizes[0], top_k = inverse.sizes[1], P = num_rows, K = grad.sizes[1];
  if (grad.sizes[0] != T) fail(kBackward, ": grad must have the ", T, " rows of inverse, got ", grad.sizes[0]);
  if (topk_scores) check_sizes({kBackward, "topk_scores"}, *topk_scores, inverse.sizes, 2);
  check_count(kBackward, "num_rows", num_rows);
  if (y) {
    check_dtype_of_like({kBackward, "y"}, *y, grad);
    check_sizes({kBackward, "y"}, *y, {P, K});
  }
  validate_range({kBackward, "inverse"}, inverse, P, "rows of y");
  if (keep_grad_y) validate_distinct({kBackward, "inverse"}, inverse);
  const Call call(kBackward, "grad", grad);
  const int32_t scores_dtype = topk_scores ? topk_scores->dtype : kFloat32;
  Handle grad_y = call.empty({keep_grad_y ? P : 0, K}, grad.dtype);
  Handle grad_scores = y ? call.empty({T, top_k}, scores_dtype) : call.empty({0}, scores_dtype);
  const Handle slot_of = call.on_gpu() && keep_grad_y ? call.empty({P}, kInt32) : Handle();  // scratch of the kernel
  const CombineBackwardParams p = {
      grad.data, y ? y->data : nullptr, inverse.as<int>(), topk_scores ? topk_scores->data : nullptr,
      slot_of ? data<int>(slot_of) : nullptr, keep_grad_y ? data(grad_y) : nullptr,
      y ? data(grad_scores) : nullptr, T, top_k, P, K,
      grad.strides[0], y ? y->strides[0] : 0, in_type(grad), scores_dtype == kFloat32};
  MOE_FP8_RUN(call, combine_backward, p);
  return results(grad_y, grad_scores);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(combine)
MOE_FP8_REGISTER(combine_backward)
