// Functors that scans and reductions combine values with.
#pragma once
#include <cstdint>

#include "platform/compiler.h"

namespace moe_fp8 {

struct Sum { MOE_DEVICE int operator()(int a, int b) const { return a + b; } };
struct Max { MOE_DEVICE int operator()(int a, int b) const { return a > b ? a : b; } };
struct Min { MOE_DEVICE int operator()(int a, int b) const { return a < b ? a : b; } };
struct SumUpTo {  // saturates at a limit of at least 0, so sums of values of at least 0 never overflow
  int limit;
  MOE_DEVICE int operator()(int a, int b) const { return a < limit - b ? a + b : limit; }
};
struct MaxU32 { MOE_DEVICE uint32_t operator()(uint32_t a, uint32_t b) const { return a > b ? a : b; } };
struct SumF32 { MOE_DEVICE float operator()(float a, float b) const { return a + b; } };

}  // namespace moe_fp8
