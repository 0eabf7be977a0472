// The sum of the rows of slots, for ops that end in it.
#pragma once
#include "kernels/combine.h"
#include "ops/common.h"

namespace moe_fp8 {

void combine(const Call& call, const Tensor& y, const CombineParams& p);

}  // namespace moe_fp8
