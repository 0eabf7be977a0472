#include "quantize/rows.h"

namespace moe_fp8 {

Beside rows_beside(const QuantizeParams& p, bool columns_are_fast) {
  const Device& d = device();
  const int64_t bytes = row_bytes(p);
  if (!d.overlaps_kernels || rows_of(p) > kMaxRowsLaunch || bytes > d.shared_per_multiprocessor / 10)
    return Beside::kNo;
  const bool clusters = d.has_clusters && columns_are_fast && !p.index.at && average_rows(p) >= kLeastInStep;
  const bool fits = average_rows(p) * bytes * kGroupsOfL2 <= d.l2_bytes;
  const bool drifts = rows_of(p) * bytes > int64_t(kDrift) * d.l2_bytes;
  if (clusters && fits && drifts && bytes >= kShortestInStep) return Beside::kInStep;
  return bytes >= kShortestBeside ? Beside::kYes : Beside::kNo;
}

template int launch_rows<BF16>(const QuantizeParams&, Beside, void*);
template int launch_rows<F16>(const QuantizeParams&, Beside, void*);
template int launch_rows<F32>(const QuantizeParams&, Beside, void*);
template int launch_rows<Generic>(const QuantizeParams&, Beside, void*);

}  // namespace moe_fp8
