// The way of quantize_activated_backward() in formats with blocks.
#pragma once
#include "activations/backward/quantize_activated_backward.h"

namespace moe_fp8 {

// Whether tiles do it, of types that kernels have.
bool can_take_gradient_tiles(const QuantizeActivatedBackwardParams& p);

int64_t gradient_tiles_words(const QuantizeActivatedBackwardParams& p);

int launch_gradient_tiles(const QuantizeActivatedBackwardParams& p, void* stream);

}  // namespace moe_fp8
