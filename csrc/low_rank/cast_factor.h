// cast_factor: m of up to three dimensions -> out, in another type, another order of dimensions and other sizes.
//
//   out[i] = RN(RN32(scaling * m[i]))     RN: rounds to the type of out; 0 where m has no i
//
// out is dense. Dimensions are listed from the one whose elements are adjacent in out to the outermost one. m may have
// any strides that are not negative, and any alignment. Where a size of out is smaller than m's, m is cropped.
#pragma once
#include "numerics/floats.h"

namespace moe_fp8 {

struct FactorDim {
  int64_t size;    // of out; less than 2^31
  int64_t given;   // of them, how many m has
  int64_t stride;  // of m, in elements
};
constexpr int kFactorDims = 3;

struct CastFactorParams {
  const void* m;
  void* out;
  FactorDim dims[kFactorDims];
  float scaling;
  InType in, out_type;
};

// On the current GPU, where the result is 0 or the runtime's error code, and on the CPU.
int cast_factor(const CastFactorParams& p, void* stream);
void cast_factor_cpu(const CastFactorParams& p);

}  // namespace moe_fp8
