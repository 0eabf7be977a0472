#include "ops/combine.h"

#include "ops/cpu_loops.h"
#include "ops/permute.h"

namespace moe_fp8 {
namespace {

void check_inverse(const char* op, const Tensor& inverse, const char* like, const Tensor& x) {
  check_dim(op, "inverse", inverse, 2);
  if (inverse.dtype != kInt32) fail(op, ": inverse must be int32, got ", dtype_name(inverse.dtype));
  check_contiguous(op, "inverse", inverse);
  check_size(op, "inverse", inverse.sizes[0] * inverse.sizes[1], "slots");
  check_size(op, "inverse", inverse.sizes[0], "rows");
  check_same_device(op, "inverse", inverse, like, x);
}
void check_scores(const char* op, const Tensor& scores, const Tensor& inverse, const char* like, const Tensor& x) {
  check_dim(op, "topk_scores", scores, 2);
  if (scores.dtype != kFloat32 && scores.dtype != x.dtype)
    fail(op, ": topk_scores must be float32 or, like ", like, ", ", dtype_name(x.dtype), ", got ",
         dtype_name(scores.dtype));
  for (int i = 0; i < 2; ++i)
    if (scores.sizes[i] != inverse.sizes[i])
      fail(op, ": topk_scores must have size ", inverse.sizes[i], " in dimension ", i, ", got ", scores.sizes[i]);
  check_contiguous(op, "topk_scores", scores);
  check_same_device(op, "topk_scores", scores, like, x);
}

bool is_row(int row, int64_t rows) { return row >= 0 && row < rows; }

template <class In>
void cpu_combine(const CombineParams& p) {
  using Bits = typename In::Bits;
  parallel(p.T, p.T * p.top_k * p.K, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(p.K);
    for (int64_t t = begin; t < end; ++t) {
      std::fill(sum.begin(), sum.end(), 0.f);
      for (int64_t slot = t * p.top_k; slot < (t + 1) * p.top_k; ++slot) {
        if (!is_row(p.inverse[slot], p.P)) continue;
        const Bits* y = static_cast<const Bits*>(p.y) + p.inverse[slot] * p.y_stride;
        const float score = score_of<In>(p.scores, p.scores_f32, slot);
        for (int64_t k = 0; k < p.K; ++k) sum[k] += score * In::to_float(y[k]);
      }
      Bits* out = static_cast<Bits*>(p.out) + t * p.K;
      for (int64_t k = 0; k < p.K; ++k) out[k] = In::from_float(sum[k]);
    }
  });
}

template <class In>
void cpu_combine_backward(const CombineBackwardParams& p) {
  using Bits = typename In::Bits;
  const int64_t slots = p.T * p.top_k;
  std::vector<int64_t> slot_of(p.P, -1);
  for (int64_t slot = 0; slot < slots; ++slot)
    if (is_row(p.inverse[slot], p.P)) slot_of[p.inverse[slot]] = slot;
  if (p.grad_scores) std::memset(p.grad_scores, 0, slots * (p.scores_f32 ? 4 : sizeof(Bits)));
  parallel(p.P, p.P * p.K, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      Bits* grad_y = static_cast<Bits*>(p.grad_y) + r * p.K;
      const int64_t slot = slot_of[r];
      if (slot < 0) {
        std::memset(grad_y, 0, p.K * sizeof(Bits));
        continue;
      }
      const Bits* grad = static_cast<const Bits*>(p.grad) + slot / p.top_k * p.grad_stride;
      const float score = score_of<In>(p.scores, p.scores_f32, slot);
      for (int64_t k = 0; k < p.K; ++k) grad_y[k] = In::from_float(score * In::to_float(grad[k]));
      if (p.grad_scores == nullptr) continue;
      const Bits* y = static_cast<const Bits*>(p.y) + r * p.y_stride;
      float dot = 0;
      for (int64_t k = 0; k < p.K; ++k) dot += In::to_float(grad[k]) * In::to_float(y[k]);
      if (p.scores_f32) static_cast<uint32_t*>(p.grad_scores)[slot] = F32::from_float(dot);
      else static_cast<Bits*>(p.grad_scores)[slot] = In::from_float(dot);
    }
  });
}

}  // namespace

void combine(const Call& call, const Tensor& y, const CombineParams& p) {
#if defined(MOE_FP8_GPU)
  if (y.on_gpu()) return call.check(combine(p, call.stream()));
#endif
  dispatch_in(p.in, [&](auto in) { return cpu_combine<decltype(in)>(p), 0; });
}

Results<1> combine_op(const Tensor& y, const Tensor& inverse, const std::optional<Tensor>& topk_scores) {
  constexpr const char* kOp = "combine";
  CombineParams p = {};
  p.in = check_tokens(kOp, "y", y);
  check_inverse(kOp, inverse, "y", y);
  if (topk_scores) check_scores(kOp, *topk_scores, inverse, "y", y);
  validate_range(kOp, "inverse", inverse, y.sizes[0], "rows of y");
  const Call call(kOp, "y", y);
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
  combine(call, y, p);
  return results(out);
}

Results<2> combine_backward_op(const Tensor& grad, const std::optional<Tensor>& y, const Tensor& inverse,
                               const std::optional<Tensor>& topk_scores, int64_t num_rows) {
  constexpr const char* kOp = "combine_backward";
  CombineBackwardParams p = {};
  p.in = check_tokens(kOp, "grad", grad);
  check_inverse(kOp, inverse, "grad", grad);
  p.T = inverse.sizes[0];
  p.top_k = inverse.sizes[1];
  p.P = num_rows;
  p.K = grad.sizes[1];
  if (grad.sizes[0] != p.T) fail(kOp, ": grad must have the ", p.T, " rows of inverse, got ", grad.sizes[0]);
  if (topk_scores) check_scores(kOp, *topk_scores, inverse, "grad", grad);
  if (p.P < 0 || p.P > kMaxRows) fail(kOp, ": num_rows must be from 0 to ", kMaxRows, ", got ", p.P);
  if (y) {
    if (y->dtype != grad.dtype)
      fail(kOp, ": y must be, like grad, ", dtype_name(grad.dtype), ", got ", dtype_name(y->dtype));
    check_tokens(kOp, "y", *y);
    for (int i = 0; i < 2; ++i)
      if (const int64_t size = i ? p.K : p.P; y->sizes[i] != size)
        fail(kOp, ": y must have size ", size, " in dimension ", i, ", got ", y->sizes[i]);
    check_same_device(kOp, "y", *y, "grad", grad);
    p.y = y->data;
    p.y_stride = y->strides[0];
  }
  validate_range(kOp, "inverse", inverse, p.P, "rows of y");
  validate_distinct(kOp, "inverse", inverse);
  const Call call(kOp, "grad", grad);
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
#if defined(MOE_FP8_GPU)
  if (grad.on_gpu()) {
    Handle slot_of = call.empty({p.P}, kInt32);
    p.slot_of = data<int>(slot_of);
    call.check(combine_backward(p, call.stream()));
    return results(grad_y, grad_scores);
  }
#endif
  dispatch_in(p.in, [&](auto in) { return cpu_combine_backward<decltype(in)>(p), 0; });
  return results(grad_y, grad_scores);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(combine)
MOE_FP8_REGISTER(combine_backward)
