// The activation between the two products of an expert, and its gradient, for P rows of F features.
//
// a[p, f]    = RN(activated(gate[p, f], up[p, f]))
//
// Backward, with s = scores[slot of p] and w = RN32(s * da[p, f]): each result is computed in float32 as
// numerics/activations.h defines it, then rounded once.
// dh[p]              = the gradients of gate and up, where w is the gradient of a
// a[p, f]            = RN(RN32(s * activated(...)))
// dscores[slot of p] = sum over f of da[p, f] * activated(...) in float32
//
// The slot of a row is its own number or, with `slots`, the entry there. A row without a slot has s = 0. dscores of a
// slot without a row is 0. If a slot has several rows, its dscores is computed from any one of them.
//
// A gated h is [P, 2F]: gates in the first half and ups in the second, or gates in even columns and ups in odd ones.
// Otherwise h [P, F] holds the gates. An fp8 h stands for RN32(q * scale). h, da and scores have an inner stride of 1;
// a, dh and dscores are contiguous. Null scores are ones.
#pragma once
#include "numerics/activations.h"
#include "numerics/floats.h"
#include "numerics/groups.h"
#include "numerics/operand_scales.h"

namespace moe_fp8 {

struct GateRows {
  const void* h;
  int64_t stride;       // elements
  int64_t F;
  InType in;
  Fp8Type fp8;          // type of an h with scales
  OperandScales scale;  // no data: h has no scales, and its type is `in`
  bool interleaved;
  Clamp clamp = {};
};

struct ActivateParams {
  GateRows h;
  void* a;
  int64_t P;
  Activation activation;
};

struct ActivateBackwardParams {
  GateRows h;
  const void* da;
  RowIndex slots;     // slot of each row; slots.at null: row p has slot p
  const float* scores;
  void* dh;
  void* a;
  float* dscores;
  int64_t P;
  int64_t da_stride;  // elements
  InType in;          // type of da, dh and a
  Activation activation;

  MOE_HD int64_t num_slots() const { return slots.at ? int64_t(slots.limit) : P; }
  MOE_HD int slot(int64_t row) const { return slot_of(slots, row); }  // -1: no slot
  MOE_HD float score(int64_t row) const {
    if (!slots.at) return scores ? scores[row] : 1.f;
    const int s = slot(row);
    return s < 0 ? 0.f : scores[s];
  }
};

// On the current GPU, where the result is 0 or the runtime's error code, and on the CPU.
int activate(const ActivateParams& p, void* stream);
void activate_cpu(const ActivateParams& p);
int activate_backward(const ActivateBackwardParams& p, void* stream);
void activate_backward_cpu(const ActivateBackwardParams& p);

}  // namespace moe_fp8
