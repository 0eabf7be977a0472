// The group whose bias a row gets.
#pragma once
#include "activations/forward/add_bias.h"
#include "activations/gates.h"
#include "platform/waves.h"

namespace moe_fp8 {

// Called by whole waves, with one row for all lanes. Returns E if the row has no group. The order of ends is not
// trusted: the first end behind the row is the group's.
MOE_DEVICE int group_of_row(const GroupBias& bias, int row) {
  const int lane = threadIdx.x % kWarpSize;
  for (int first = 0; first < bias.E; first += kWarpSize) {
    const bool ends_behind = first + lane < bias.E && bias.offs[first + lane] > row;
    if (const LaneMask found = ballot(ends_behind)) return first + popcount((found & -found) - 1);
  }
  return bias.E;
}

}  // namespace moe_fp8
