// The activations of experts between their two products, and the gradient of that, for P rows of F features.
//
// a[p, f]    = RN(activated(gate[p, f], up[p, f]))
//
// backward, with s = scores[slot of p], w = RN32(s * da[p, f]), what numerics/activations.h says in float32, and each
// rounded once:
// dh[p]              = the gradients of gate and up where that of a is w
// a[p, f]            = RN(RN32(s * activated(...)))
// dscores[slot of p] = sum over f of da[p, f] * activated(...) in float32
//
// A row is a slot of its own number, or that of `slots`; where that is none, s is 0. dscores of a slot without a row is
// 0, of several rows that of any of them.
//
// Gated: h [P, 2F], gates in its first half and ups in the other, or in even and odd columns; else h [P, F] is the
// gates. An fp8 h stands for RN32(q * scale). h, da and scores have an inner stride of 1; a, dh and dscores are
// contiguous. Null scores are ones.
#pragma once
#include <type_traits>

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
  Fp8Type fp8;          // of an h with scales
  OperandScales scale;  // without data: h is of `in`
  bool interleaved;
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
  RowIndex slots;     // of the rows, a row's being its slot; at null: those of their numbers
  const float* scores;
  void* dh;
  void* a;
  float* dscores;
  int64_t P;
  int64_t da_stride;  // elements
  InType in;          // of da, dh and a
  Activation activation;

  MOE_HD int64_t num_slots() const { return slots.at ? int64_t(slots.limit) : P; }
  MOE_HD int slot(int64_t row) const { return slots.at ? slots.slot(row) : int(row); }  // -1: none
  MOE_HD float score(int64_t row) const {
    if (!slots.at) return scores ? scores[row] : 1.f;
    const int s = slot(row);
    return s < 0 ? 0.f : scores[s];
  }
};

// 0, or the runtime's error code.
int activate(const ActivateParams& p, void* stream);
int activate_backward(const ActivateBackwardParams& p, void* stream);

}  // namespace moe_fp8
