#include "kernels/quantize_rowcol.h"

#include "kernels/quantize_rowwise.h"
#include "kernels/quantize_strips.h"

namespace moe_fp8 {
namespace {

// Columns and rows side by side, in the same order: what one of the two kernels has read, the other finds in the L2.
// Where they cannot overlap, the rows start where the columns end.
template <class Groups>
int quantize_both(const QuantizeRowcolParams& p, int64_t outer, int64_t average_rows, void* stream) {
  QuantizeRowwiseParams rows = {p.x,  p.q, p.scale, outer, p.rows, p.K, p.group_stride, p.row_stride,
                                p.in, p.out, p.pow2_scale};
  rows.beside = can_run_beside(rows);
  StripArgs columns = strip_args(p, p.rows);
  columns.group_stride = p.group_stride;
  columns.rows_beside = rows.beside;
  columns.last_first = !rows.beside;
  if (const int e = launch_strips<Groups>(p.in, p.out, average_rows, columns, stream)) return e;
  return quantize_rowwise(rows, stream);
}

}  // namespace

int quantize_rowcol(const QuantizeRowcolParams& p, void* stream) {
  return quantize_both<TokenGroups>(p, 1, p.E ? p.rows / p.E : 0, stream);
}
int quantize_weight(const QuantizeRowcolParams& p, void* stream) {
  return quantize_both<ExpertGroups>(p, p.E, p.rows, stream);
}

}  // namespace moe_fp8
