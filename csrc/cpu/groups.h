// Group ends for CPU loops.
#pragma once
#include <algorithm>
#include <vector>

#include "numerics/groups.h"

namespace moe_fp8 {

// The ends of groups, as clamp_and_scan_offs() of primitives/groups.h computes them: offs clamped into [0, rows] and
// made monotonic. offs is read once, because another thread may write to it.
inline std::vector<int> safe_ends(const int* offs, int64_t E, int64_t rows) {
  std::vector<int> ends(E);
  int previous = 0;
  for (int64_t e = 0; e < E; ++e) ends[e] = previous = std::max(previous, clamp_offset(offs[e], int(rows)));
  return ends;
}

}  // namespace moe_fp8
