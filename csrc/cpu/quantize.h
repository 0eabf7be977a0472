// The quantizers on the CPU: as quantize/quantize.h has them, all pointers the host's.
#pragma once
#include "quantize/quantize.h"

namespace moe_fp8 {

void quantize_cpu(const QuantizeParams& p);

}  // namespace moe_fp8
