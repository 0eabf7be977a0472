// Quantizes the gradients of experts' activations as they are computed: dh along rows and along tokens, scores * a
// along tokens. dh and a are never in memory. Two passes compute them from h and da, or one if scales are of blocks.
//
// dh, a, dscores                        = activate_backward(da, h, scores, slots)
// q, scale, q_t, scale_t, padded_offs   = quantize_both(dh, offs)
// a_q_t, a_scale_t, the same            = quantize_tokens(a, offs), with its own amax
// dh_sums                               = sum_groups(dh, offs), where it is wanted
//
// The separate ops give the same bytes. activations.h describes h and da. If quantize_dh is not along tokens, there is
// one pass, by rows, and no a_q_t. dh and scores * a are then also written in bfloat16, where `gradients` points.
#pragma once
#include "activations/activations.h"
#include "quantize/quantize.h"

namespace moe_fp8 {

struct QuantizeActivatedBackwardParams {
  ActivateBackwardParams gradients;         // along tokens, dh and a are not written
  QuantizeParams quantize_dh, quantize_a;   // arguments of quantize() for the same groups; x is not read
  float* dh_sums;                           // [E, columns of h], null: not wanted. Along tokens only
  int* scratch;                             // scratch_words()
};

// True if kernels compute it. Otherwise callers run activate_backward() and quantize().
bool can_quantize_activated_backward(const QuantizeActivatedBackwardParams& p);

// Words of scratch. The score of every row, if scores are by slot, and partial sums of dh, if its sums are wanted: of
// 16 rows, or of 64 for scales of blocks. Then, for scales of rows: the rows of every 16
// positions, an amax and a multiplier of every column of a group, and the starts of groups; in rows of several blocks
// also a sum of every row over each wave's features. For scales of blocks: the places of tiles, and a sum of every row
// over each 128 features.
int64_t scratch_words(const QuantizeActivatedBackwardParams& p);

// Returns 0 or the runtime's error code.
int quantize_activated_backward(const QuantizeActivatedBackwardParams& p, void* stream);

}  // namespace moe_fp8
