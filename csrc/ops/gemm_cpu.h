// scaled_grouped_mm on the CPU: dequantizes operands to float32 and multiplies them by torch, group by group.
#pragma once
#include "gemm/scaled_grouped_mm.h"
#include "ops/call.h"

namespace moe_fp8 {

void scaled_grouped_mm_cpu(const Call& call, const ScaledGroupedMmParams& p);

}  // namespace moe_fp8
