// Ops that move whole rows of any dtype.
#pragma once
#include "kernels/copy_rows.h"
#include "ops/common.h"
#include "ops/cpu_loops.h"

namespace moe_fp8 {

// Rows of any dtype of 1, 2 or 4 bytes; returns the bytes of an element.
inline int64_t check_rows(const char* op, const char* arg, const Tensor& x) {
  const int64_t bytes = int64_t(aoti_torch_dtype_element_size(x.dtype));
  if (bytes != 1 && bytes != 2 && bytes != 4)
    fail(op, ": ", arg, " must have a dtype of 1, 2 or 4 bytes, got ", dtype_name(x.dtype));
  check_matrix(op, arg, x);
  return bytes;
}
inline void check_count(const char* op, const char* arg, int64_t rows) {
  if (rows < 0 || rows > kMaxRows) fail(op, ": ", arg, " must be from 0 to ", kMaxRows, ", got ", rows);
}
// out[p] = row source.row(p) of x, rows of zeros where that is none.
inline void copy_rows(const Call& call, const Tensor& x, const Handle& out, const RowIndex& source, int64_t rows) {
  const int64_t bytes = int64_t(aoti_torch_dtype_element_size(x.dtype));
  const CopyRowsParams p = {x.data, data(out), source, rows, x.sizes[1] * bytes, x.strides[0] * bytes};
#if defined(MOE_FP8_GPU)
  if (x.on_gpu()) return call.check(copy_rows(p, call.stream()));
#endif
  parallel(rows, rows * p.row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t from = p.source.row(r);
      char* to = static_cast<char*>(p.to) + r * p.row_bytes;
      if (from < 0) std::memset(to, 0, p.row_bytes);
      else std::memcpy(to, static_cast<const char*>(p.from) + from * p.from_stride, p.row_bytes);
    }
  });
}

}  // namespace moe_fp8
