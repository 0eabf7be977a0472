// The activations of experts on the CPU: as activations/activations.h has them.
#pragma once
#include "activations/activations.h"

namespace moe_fp8 {

void activate_cpu(const ActivateParams& p);
void activate_backward_cpu(const ActivateBackwardParams& p);

}  // namespace moe_fp8
