// quantize_activated_backward() for formats with blocks.
#pragma once
#include "activations/backward/quantize_activated_backward.h"

namespace moe_fp8 {

// True if the kernel of tiles takes these sizes on this GPU. The caller has checked the types.
bool can_take_gradient_tiles(const QuantizeActivatedBackwardParams& p);

// Words of scratch behind the scores.
int64_t gradient_tiles_words(const QuantizeActivatedBackwardParams& p);

int launch_gradient_tiles(const QuantizeActivatedBackwardParams& p, void* stream);

}  // namespace moe_fp8
