// copy_rows: to [rows, ...]: row p is row source.row(p) of from, zeros where that is none.
//
// Rows are row_bytes of any dtype; `to` is contiguous, from_stride in bytes. No alignment is asked of either.
#pragma once
#include "numerics/groups.h"

namespace moe_fp8 {

struct CopyRowsParams {
  const void* from;
  void* to;
  RowIndex source;
  int64_t rows, row_bytes, from_stride;
};

// 0, or the runtime's error code.
int copy_rows(const CopyRowsParams& p, void* stream);

}  // namespace moe_fp8
