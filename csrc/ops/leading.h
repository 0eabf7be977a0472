// Tensors [..., K] with any leading dimensions, seen as rows.
#pragma once
#include <torch/csrc/stable/ops.h>

#include "ops/tensor.h"

namespace moe_fp8 {

// Leading dimensions merged into two: [outer, rows].
struct LeadingRows { int64_t outer, rows, outer_stride, row_stride; };

// The leading rows of x, `count` altogether. Nothing if the strides of x do not allow two dimensions.
inline std::optional<LeadingRows> as_rows(const Tensor& x, int64_t count) {
  if (count == 0) return LeadingRows{1, 0, 0, 0};
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
// x as rows, or a contiguous copy of it.
struct AsRows {
  AsRows(const Tensor& x, int64_t count) : rows(as_rows(x, count)), data(x.data) {
    if (rows) return;
    copy.emplace(share(torch::stable::contiguous(stable_tensor(x.handle)).get()));
    rows = as_rows(*copy, count);
    data = copy->data;
  }
  std::optional<Tensor> copy;
  std::optional<LeadingRows> rows;
  const void* data;
};

}  // namespace moe_fp8
