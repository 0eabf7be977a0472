// swizzle_scales and unswizzle_scales on the CPU; scales/swizzle_scales.h defines them.
#pragma once
#include "scales/swizzle_scales.h"

namespace moe_fp8 {

void swizzle_scales_cpu(const SwizzleScalesParams& p);
void unswizzle_scales_cpu(const SwizzleScalesParams& p);

}  // namespace moe_fp8
