// Loads that leave the L1 to other data.
#pragma once
#include "platform/memory.h"

namespace moe_fp8 {

// For lines that other blocks read again, from the L2, but this block does not.
MOE_DEVICE Vec16 load_past_l1(const Vec16* p) {
#if defined(MOE_CUDA)
  const uint4 v = __ldcg(reinterpret_cast<const uint4*>(p));
  return {v.x, v.y, v.z, v.w};
#else
  return *p;
#endif
}

}  // namespace moe_fp8
