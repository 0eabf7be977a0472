// What the package tells scaled_grouped_mm about torch.
#pragma once

namespace moe_fp8 {

// Its grouped GEMM with E8M0 scales is an option of its build: without it the call raises, every time.
extern bool torch_has_mx_gemm;

}  // namespace moe_fp8
