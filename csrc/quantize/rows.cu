#include "quantize/rows.h"

namespace moe_fp8 {

bool can_run_beside(const QuantizeParams& p) {
  const int64_t bytes = row_bytes(p);
  return device().overlaps_kernels && rows_of(p) <= kMaxRowsLaunch && bytes >= kShortestBeside &&
         bytes <= device().shared_per_multiprocessor / 10;
}

template int launch_rows<BF16>(const QuantizeParams&, bool, void*);
template int launch_rows<F16>(const QuantizeParams&, bool, void*);
template int launch_rows<F32>(const QuantizeParams&, bool, void*);
template int launch_rows<Any>(const QuantizeParams&, bool, void*);

}  // namespace moe_fp8
