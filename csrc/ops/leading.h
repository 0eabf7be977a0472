// Tensors [..., K] of any leading dimensions, as rows.
#pragma once
#include "ops/common.h"

namespace moe_fp8 {

// x's leading dimensions as two: [outer, rows]. Empty where the strides do not allow it.
struct LeadingRows { int64_t outer, rows, outer_stride, row_stride; };
inline std::optional<LeadingRows> as_rows(const Tensor& x) {
  LeadingRows r = {1, 1, 0, 0};
  int64_t d = x.dim - 2;
  auto merge = [&](int64_t& size, int64_t& stride) {
    for (; d >= 0; --d) {
      if (x.sizes[d] == 1) continue;
      if (size > 1 && x.strides[d] != size * stride) return;
      if (size == 1) stride = x.strides[d];
      size *= x.sizes[d];
    }
  };
  merge(r.rows, r.row_stride);
  merge(r.outer, r.outer_stride);
  if (d >= 0) return std::nullopt;
  return r;
}
inline Tensor contiguous(const Tensor& x) {
  const auto copy = torch::stable::contiguous(torch::stable::Tensor(share(x.handle).release()));
  AtenTensorHandle handle = nullptr;
  check_torch(aoti_torch_new_tensor_handle(copy.get(), &handle));
  return Tensor(handle);
}

}  // namespace moe_fp8
