// Groups for CPU loops.
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

// The group of a row, or E if it is in none.
inline int64_t group_of(const std::vector<int>& ends, int64_t row) {
  return std::upper_bound(ends.begin(), ends.end(), row) - ends.begin();
}

// Calls f(e, first row, size) for each group.
template <class F>
void for_each_group(const std::vector<int>& ends, F f) {
  int64_t start = 0;
  for (size_t e = 0; e < ends.size(); start = ends[e++]) f(int64_t(e), start, ends[e] - start);
}

}  // namespace moe_fp8
