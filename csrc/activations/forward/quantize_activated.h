// Quantizes the activations of experts along their rows, from one read of h. Quantizes h too, if backward wants it.
//
// h            = add_bias(h, bias)               if there is a bias
// q, scale     = quantize_rows(activate(h))
// h_q, h_scale = quantize_rows(h)                unless quantize_h has no rows
//
// The separate ops give the same bytes. activations.h describes h, which has no scales here.
#pragma once
#include "activations/activations.h"
#include "activations/forward/add_bias.h"
#include "quantize/quantize.h"

namespace moe_fp8 {

struct QuantizeActivatedParams {
  GateRows h;
  Activation activation;
  // Arguments of quantize(). a is never in memory, so quantize_a.x is not read. quantize_a has all rows.
  QuantizeParams quantize_a, quantize_h;
  GroupBias bias;
};

// True if one kernel computes it. Otherwise callers run activate() and quantize().
bool can_quantize_activated(const QuantizeActivatedParams& p);

// Returns 0 or the runtime's error code.
int quantize_activated(const QuantizeActivatedParams& p, void* stream);

}  // namespace moe_fp8
