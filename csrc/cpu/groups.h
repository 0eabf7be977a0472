// Ends of groups for the CPU's loops, which read them once.
#pragma once
#include <algorithm>
#include <vector>

#include "numerics/groups.h"

namespace moe_fp8 {

// offs made safe, as the kernels' group table does it: exclusive ends, clamped and monotonic.
inline std::vector<int> safe_ends(const int* offs, int64_t E, int64_t rows) {
  std::vector<int> ends(E);
  int previous = 0;
  for (int64_t e = 0; e < E; ++e) ends[e] = previous = std::max(previous, clamp_offset(offs[e], int(rows)));
  return ends;
}

}  // namespace moe_fp8
