// The activations of experts on the CPU; activations/activations.h defines them.
#pragma once
#include "activations/activations.h"

namespace moe_fp8 {

void activate_cpu(const ActivateParams& p);
void activate_backward_cpu(const ActivateBackwardParams& p);

}  // namespace moe_fp8
