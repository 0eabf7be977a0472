#include "tokens/combine.h"

#include "ops/checks.h"

namespace moe_fp8 {
namespace {

constexpr const char *kCombine = "combine", *kBackward = "combine_backward";

void check_scores(const Argument& arg, const Tensor& scores, const Tensor& inverse, const Tensor& like) {
  check(arg, scores, like);
  check_sizes(arg, scores, inverse.sizes, 2);
}

}  // namespace

Results<1> combine_op(const Tensor& y, const Tensor& inverse, const std::optional<Tensor>& topk_scores) {
  constexpr const Argument &kY = argument(kCombine, "y"), &kInverse = argument(kCombine, "inverse"),
                           &kScores = argument(kCombine, "topk_scores");
  check(kY, y);
  check(kInverse, inverse, y);
  if (topk_scores) check_scores(kScores, *topk_scores, inverse, y);
  validate_range(kInverse, inverse, y.sizes[0], "rows of y");
  const Call call(kCombine, "y", y);
  CombineParams p = {};
  p.in = in_type(y);
  p.T = inverse.sizes[0];
  p.top_k = inverse.sizes[1];
  p.P = y.sizes[0];
  p.K = y.sizes[1];
  Handle out = call.empty({p.T, p.K}, y.dtype);
  p.y = y.data;
  p.inverse = inverse.as<int>();
  p.scores = topk_scores ? topk_scores->data : nullptr;
  p.scores_f32 = topk_scores && topk_scores->dtype == kFloat32;
  p.out = data(out);
  p.y_stride = y.strides[0];
  MOE_FP8_RUN(call, combine, p);
  return results(out);
}

Results<2> combine_backward_op(const Tensor& grad, const std::optional<Tensor>& y,
                               const std::optional<Tensor>& topk_scores, const Tensor& inverse, int64_t num_rows) {
  constexpr const Argument &kGrad = argument(kBackward, "grad"), &kY = argument(kBackward, "y"),
                           &kInverse = argument(kBackward, "inverse"), &kScores = argument(kBackward, "topk_scores");
  check(kGrad, grad);
  check(kInverse, inverse, grad);
  CombineBackwardParams p = {};
  p.in = in_type(grad);
  p.T = inverse.sizes[0];
  p.top_k = inverse.sizes[1];
  p.P = num_rows;
  p.K = grad.sizes[1];
  if (grad.sizes[0] != p.T) fail(kBackward, ": grad must have the ", p.T, " rows of inverse, got ", grad.sizes[0]);
  if (topk_scores) check_scores(kScores, *topk_scores, inverse, grad);
  check_count(kBackward, "num_rows", num_rows);
  if (y) {
    check(kY, *y, grad);
    check_dtype_of_like(kY, *y, grad);
    const int64_t sizes[] = {p.P, p.K};
    check_sizes(kY, *y, sizes, 2);
    p.y = y->data;
    p.y_stride = y->strides[0];
  }
  validate_range(kInverse, inverse, p.P, "rows of y");
  validate_distinct(kInverse, inverse);
  const Call call(kBackward, "grad", grad);
  const int32_t scores_dtype = topk_scores ? topk_scores->dtype : kFloat32;
  Handle grad_y = call.empty({p.P, p.K}, grad.dtype);
  Handle grad_scores = y ? call.empty({p.T, p.top_k}, scores_dtype) : call.empty({0}, scores_dtype);
  p.grad = grad.data;
  p.inverse = inverse.as<int>();
  p.scores = topk_scores ? topk_scores->data : nullptr;
  p.grad_y = data(grad_y);
  p.grad_scores = y ? data(grad_scores) : nullptr;
  p.grad_stride = grad.strides[0];
  p.scores_f32 = scores_dtype == kFloat32;
  Handle slot_of;  // scratch of the kernel
  if (call.on_gpu()) p.slot_of = data<int>(slot_of = call.empty({p.P}, kInt32));
  MOE_FP8_RUN(call, combine_backward, p);
  return results(grad_y, grad_scores);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(combine)
MOE_FP8_REGISTER(combine_backward)
