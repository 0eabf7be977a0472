// Both directions of one tensor: behind quantize_rowcol, quantize_weight and permute_pad_quantize_rowcol.
#pragma once
#include "kernels/quantize_rowcol.h"
#include "kernels/quantize_rows.h"
#include "kernels/quantize_strips.h"

namespace moe_fp8 {
namespace {

// Columns and rows side by side, in the same order: what one of the two kernels has read, the other finds in the L2.
// Where they cannot overlap, the rows start where the columns end.
template <class Groups>
int quantize_both(const QuantizeRowcolParams& p, int64_t outer, int64_t average_rows, void* stream) {
  QuantizeRowwiseParams rows = {p.x,  p.q, p.scale, outer, p.rows, p.K, p.group_stride, p.row_stride,
                                p.in, p.out, p.pow2_scale};
  rows.index = p.index;
  rows.beside = can_run_beside(rows);
  StripArgs columns = strip_args(p, p.rows);
  columns.group_stride = p.group_stride;
  columns.index = p.index;
  columns.rows_beside = rows.beside;
  columns.last_first = !rows.beside;
  if (const int e = launch_strips<Groups>(p.in, p.out, average_rows, columns, stream)) return e;
  return launch_rows<Groups::kRows>(rows, stream);
}

}  // namespace
}  // namespace moe_fp8
