// The activations of experts between their two products, and the gradient of that, for P rows of F features.
//
// a[p, f]    = RN(activated(gate[p, f], up[p, f]))
//
// backward, with w = RN32(scores[p] * da[p, f]), what numerics/activations.h says in float32, and each rounded once:
// dh[p]      = the gradients of gate and up where that of a is w
// a[p, f]    = RN(RN32(scores[p] * activated(...)))
// dscores[p] = sum over f of da[p, f] * activated(...) in float32
//
// Gated: h [P, 2F], gates in its first half and ups in the other, or in even and odd columns; else h [P, F] is the
// gates. An fp8 h stands for RN32(q * scale). h, da and scores have an inner stride of 1; a, dh and dscores are
// contiguous. Null scores are ones.
#pragma once
#include <type_traits>

#include "numerics/activations.h"
#include "numerics/floats.h"
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
  const float* scores;
  void* dh;
  void* a;
  float* dscores;
  int64_t P;
  int64_t da_stride;  // elements
  InType in;          // of da, dh and a
  Activation activation;
};

// 0, or the runtime's error code.
int activate(const ActivateParams& p, void* stream);
int activate_backward(const ActivateBackwardParams& p, void* stream);

}  // namespace moe_fp8
