// Tokens quantized on their way into messages: from one read of x, without q and its scales in memory beside them.
//
// q, scale = quantize(x), along rows            rows = pack_tokens(q, ids, scores, scale)
//
// byte for byte; scales of a token lie side by side, whatever the format's order is.
#pragma once
#include "quantize/quantize.h"
#include "tokens/copy_rows.h"

namespace moe_fp8 {

struct QuantizeAndPackParams {
  QuantizeParams of_x;    // as quantize() takes it, but q and scale lie nowhere
  PackTokensParams rows;  // as pack_tokens() takes them: columns of values, of scales, and of what else there is
  int64_t top_k;          // slots of a token, of which rows.inverse has the rows
};

// Whether a kernel does it. Otherwise quantize() and pack_tokens() do.
bool can_quantize_and_pack(const QuantizeAndPackParams& p);

// 0, or the runtime's error code.
int quantize_and_pack(const QuantizeAndPackParams& p, void* stream);

}  // namespace moe_fp8
