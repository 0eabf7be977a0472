// expand_scales: float32 scales of "blockwise", which are powers of two, as the scales of "mxfp8" for the same values.
//
//   out of (r, c) = the E8M0 byte of the scale of row r, block of 128 c / 4
//
// A block of 128 is four blocks of 32, so a scale stands four times along K. The bytes lie in the blocked layout of
// numerics/scale_layout.h, with ceil(K / 32) columns. A 128x4 atom then has the scales of 128 rows in one block of 128.
// A scale that is no power of two becomes NaN.
//
// Groups::kNone: E matrices [R, K]. kRows and kColumns: groups of the rows or the columns of one matrix [R, K], with
// ends in offs [E]. Each group is a separate blocked matrix, in room for any sizes. A group of columns begins a new
// block. Padding is zero, and so are scales of no group. `out` begins at a multiple of 16 bytes.
#pragma once
#include "numerics/operand_scales.h"

namespace moe_fp8 {

// The E8M0 byte of the bits of a float32: of a power of two from 2^-127 to 2^127, exactly. Every other number has the
// byte of NaN, also zero, infinities and negative numbers, so that a wrong scale is seen.
MOE_HD uint8_t e8m0_of_power(uint32_t bits) {
  if (bits == 0x00400000u) return 0;  // 2^-127, a subnormal
  const uint32_t e = bits >> 23;
  return (bits & 0x007fffffu) == 0 && e >= 1 && e < 255 ? uint8_t(e) : uint8_t(255);
}

struct ExpandScalesParams {
  OperandScales scale;  // ScaleLayout::kFloat, block_size 128
  const int* offs;      // [E], null for Groups::kNone
  uint8_t* out;
  int64_t E, R, K;
  Groups groups;
};

int expand_scales(const ExpandScalesParams& p, void* stream);
void expand_scales_cpu(const ExpandScalesParams& p);

}  // namespace moe_fp8
