// The quantizers on the CPU; quantize/quantize.h defines them. All pointers are host pointers.
#pragma once
#include "quantize/quantize.h"

namespace moe_fp8 {

void quantize_cpu(const QuantizeParams& p);

}  // namespace moe_fp8
