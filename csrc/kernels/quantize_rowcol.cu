#include "kernels/quantize_rowcol.h"

#include "kernels/quantize_rowwise.h"
#include "kernels/quantize_strips.h"

namespace moe_fp8 {
namespace {

// Rows first, then columns from the last group to the first: what the rows read last is still in the L2.
template <class Groups>
int quantize_both(const QuantizeRowcolParams& p, int64_t outer, int64_t average_rows, void* stream) {
  const QuantizeRowwiseParams rows = {p.x,  p.q, p.scale, outer, p.rows, p.K, p.group_stride, p.row_stride,
                                      p.in, p.out, p.pow2_scale};
  if (const int e = quantize_rowwise(rows, stream)) return e;
  StripArgs columns = strip_args(p, p.rows);
  columns.group_stride = p.group_stride;
  columns.last_first = true;
  return launch_strips<Groups>(p.in, p.out, average_rows, columns, stream);
}

}  // namespace

int quantize_rowcol(const QuantizeRowcolParams& p, void* stream) {
  return quantize_both<TokenGroups>(p, 1, p.E ? p.rows / p.E : 0, stream);
}
int quantize_weight(const QuantizeRowcolParams& p, void* stream) {
  return quantize_both<ExpertGroups>(p, p.E, p.rows, stream);
}

}  // namespace moe_fp8
