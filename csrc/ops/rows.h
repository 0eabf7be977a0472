// What ops that move whole rows share.
#pragma once
#include "ops/checks.h"
#include "tokens/copy_rows.h"

namespace moe_fp8 {

// out[p] = row source.row(p) of x, or zeros where source has no row.
inline void gather_rows(const Call& call, const Tensor& x, const Handle& out, const RowIndex& source, int64_t rows) {
  const int64_t bytes = element_size(x.dtype);
  const CopyRowsParams p = {x.data, data(out), source, rows, x.sizes[1] * bytes, x.strides[0] * bytes};
  MOE_FP8_RUN(call, copy_rows, p);
}

// For ops whose kernels take no rows by index.
Results<2> permute_quantized_op(const Tensor& q, const Tensor& scale, std::string_view format, const Tensor& indices,
                                int64_t top_k, const std::optional<Tensor>& offs);

}  // namespace moe_fp8
