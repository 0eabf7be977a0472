// Quantizes tokens into messages from one read of x. q and its scales exist in the messages alone.
//
// q, scale = quantize(x), along rows            rows = pack_tokens(q, ids, scores, scale)
//
// The separate ops give the same bytes, except that the scales of a token lie side by side in every format.
#pragma once
#include "quantize/quantize.h"
#include "tokens/copy_rows.h"

namespace moe_fp8 {

struct QuantizeAndPackParams {
  QuantizeParams quantize_x;  // arguments of quantize(); q and scale are not written
  PackTokensParams rows;      // arguments of pack_tokens(); columns: values, scales, then all others
  int64_t top_k;              // slots of a token; rows.inverse has their rows
};

// True if a kernel computes it. Otherwise callers run quantize() and pack_tokens().
bool can_quantize_and_pack(const QuantizeAndPackParams& p);

// Returns 0 or the runtime's error code.
int quantize_and_pack(const QuantizeAndPackParams& p, void* stream);

}  // namespace moe_fp8
