// The gradients of experts' activations, quantized on the way: dh along rows and along tokens, scores * a along tokens.
// Neither is ever in memory: two passes compute them from h and da, or one where scales are of blocks.
//
// dh, a, dscores                        = activate_backward(da, h, scores, slots)
// q, scale, q_t, scale_t, padded_offs   = quantize_both(dh, offs)
// a_q_t, a_scale_t, the same            = quantize_tokens(a, offs), which may have another amax
//
// byte for byte, of h and da as activations.h has them.
#pragma once
#include "activations/activations.h"
#include "quantize/quantize.h"

namespace moe_fp8 {

struct QuantizeActivatedBackwardParams {
  ActivateBackwardParams gradients;  // whose dh and a lie nowhere
  QuantizeParams of_dh, of_a;        // as quantize() takes them, but x lies nowhere; in the same groups
  int* scratch;                      // scratch_words() of it
};

// Whether kernels do it. What else there is takes activate_backward() and quantize().
bool can_quantize_activated_backward(const QuantizeActivatedBackwardParams& p);

// Words: of every row its score, where those are of slots; of every 16 positions where their rows are, and of every
// column of a group an amax and a multiplier; with blocks, where tiles are, and of every row a sum for 128 features.
int64_t scratch_words(const QuantizeActivatedBackwardParams& p);

// 0, or the runtime's error code.
int quantize_activated_backward(const QuantizeActivatedBackwardParams& p, void* stream);

}  // namespace moe_fp8
