// The rows of groups, as the products with factors of a low rank read them.
#pragma once
#include "numerics/groups.h"
#include "platform/launch.h"
#include "primitives/groups.h"

namespace moe_fp8 {

// begins [E + 1]: the first row of each group, and the end of the last. Called by the whole block; ends with a barrier.
MOE_DEVICE void find_begins(int* begins, const int* offs, int E, int rows) {
  if (threadIdx.x == 0) begins[0] = 0;
  clamp_and_scan_offs(begins + 1, offs, E, rows, 1);
}

}  // namespace moe_fp8
