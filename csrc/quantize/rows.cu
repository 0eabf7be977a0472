#include "quantize/rows.h"

namespace moe_fp8 {

RowOverlap row_overlap_of(const QuantizeParams& p, bool columns_are_vectorized) {
  const Device& d = device();
  const int64_t bytes = row_bytes(p);
  const bool one_launch = rows_of(p) <= max_grid_blocks(kOverlappedThreads);
  if (!d.overlaps_kernels || !one_launch || bytes > d.shared_per_multiprocessor / 10) return RowOverlap::kNone;
  const bool clusters = d.has_clusters && columns_are_vectorized && !p.index.at && average_rows(p) >= kMinThrottledRows;
  const bool fits = average_rows(p) * bytes * kGroupsInL2 <= d.l2_bytes;
  const bool drifts = rows_of(p) * bytes > int64_t(kDriftL2s) * d.l2_bytes;
  if (clusters && fits && drifts && bytes >= kMinThrottledBytes) return RowOverlap::kThrottled;
  return bytes >= kMinOverlappedBytes ? RowOverlap::kConcurrent : RowOverlap::kNone;
}

template int launch_rows<BF16>(const QuantizeParams&, RowOverlap, void*);
template int launch_rows<F16>(const QuantizeParams&, RowOverlap, void*);
template int launch_rows<F32>(const QuantizeParams&, RowOverlap, void*);
template int launch_rows<Generic>(const QuantizeParams&, RowOverlap, void*);

}  // namespace moe_fp8
