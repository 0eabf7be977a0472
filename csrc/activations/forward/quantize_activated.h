// Activations of experts, quantized along their rows from one read of h, which is quantized beside them where backward
// wants it.
//
// q, scale     = quantize_rows(activate(h))
// h_q, h_scale = quantize_rows(h)                unless of_h has no rows
//
// byte for byte, of h as activations.h has it, without scales of its own.
#pragma once
#include "activations/activations.h"
#include "quantize/quantize.h"

namespace moe_fp8 {

struct QuantizeActivatedParams {
  GateRows h;
  Activation activation;
  QuantizeParams of_a, of_h;  // as quantize() takes them, but that a lies nowhere; of_a has all rows
};

// Whether one kernel does it. What else there is takes activate() and quantize().
bool can_quantize_activated(const QuantizeActivatedParams& p);

// 0, or the runtime's error code.
int quantize_activated(const QuantizeActivatedParams& p, void* stream);

}  // namespace moe_fp8
