// Steps that ops which move or sum whole rows share. Each runs on the CPU or on the GPU.
#pragma once
#include "cpu/tokens.h"
#include "ops/checks.h"
#include "tokens/invert.h"

namespace moe_fp8 {

// Runs copy_rows on the device of x.
inline void run_copy_rows(const Call& call, const Tensor& x, const CopyRowsParams& p) {
#if defined(MOE_FP8_GPU)
  if (x.on_gpu()) return call.check(copy_rows(p, call.stream()));
#endif
  copy_rows_cpu(p);
}
// out[p] = row source.row(p) of x, or zeros where source has no row.
inline void gather_rows(const Call& call, const Tensor& x, const Handle& out, const RowIndex& source, int64_t rows) {
  const int64_t bytes = int64_t(aoti_torch_dtype_element_size(x.dtype));
  run_copy_rows(call, x, {x.data, data(out), source, rows, x.sizes[1] * bytes, x.strides[0] * bytes});
}

// inverse [size]: the place of each index, the last one if it stands at several, -1 if it stands nowhere.
inline void invert(const Call& call, const Tensor& indices, int* inverse, int64_t size) {
  const int* at = indices.as<int>();
  const int64_t count = product(indices.sizes, indices.dim);
#if defined(MOE_FP8_GPU)
  if (indices.on_gpu()) return call.check(invert_indices(at, count, inverse, size, call.stream()));
#endif
  invert_indices_cpu(at, count, inverse, size);
}

inline void combine(const Call& call, const Tensor& y, const CombineParams& p) {
#if defined(MOE_FP8_GPU)
  if (y.on_gpu()) return call.check(combine(p, call.stream()));
#endif
  combine_cpu(p);
}

}  // namespace moe_fp8
