// Adds the bias of each row's group.
//
// out[r, n] = RN(RN32(x[r, n] + bias[e, n])), e the first group with offs[e] > r;  RN(x[r, n] + 0) if there is none
//
// x [rows, N] has any row stride; bias [E, N] and out are contiguous. All have one type. offs are not trusted: for any
// values, e is a group or none.
#pragma once
#include <cstdint>

#include "numerics/floats.h"

namespace moe_fp8 {

struct GroupBias {
  const void* values;  // null: no bias
  const int* offs;     // [E]
  int E;
};

struct AddBiasParams {
  const void* x;
  GroupBias bias;
  void* out;
  int64_t rows, N;
  int64_t x_stride;  // elements
  InType in;
};

// On the current GPU, where the result is 0 or the runtime's error code, and on the CPU.
int add_bias(const AddBiasParams& p, void* stream);
void add_bias_cpu(const AddBiasParams& p);

}  // namespace moe_fp8
