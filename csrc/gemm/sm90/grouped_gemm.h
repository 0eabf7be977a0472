// Grouped products on Hopper's tensor cores; a, b, out and the groups are those of gemm/scaled_grouped_mm.h. a is
// float8_e4m3fn or float8_e5m2, of MXFP8 the former, b float8_e4m3fn, of MXFP8 any, out bfloat16 or float32.
//
//   scales of rows     fast: applied to the sum, which the tensor cores accumulate in their own precision; otherwise
//                      sums of 128 products are promoted, added in float32 in the order of the sum, and scaled then
//   scales of blocks   sums of 128 products are promoted, scaled and added in float32, in the order of the sum; of b,
//                      where groups divide the sum, also of squares of 128 x 128, whose tiles are wider
//   MXFP8, blocked     values times scales, as bfloat16, are what is multiplied; the tensor cores accumulate the sum. b
//                      is dequantized to scratch before, a on its way to them
//
// Rows behind the last group are zero, as is the out of a group that owns nothing of the sum; where the product adds to
// out, that of such a group stays as it is. The schedule: schedule.h.
#pragma once
#include "gemm/scaled_grouped_mm.h"

namespace moe_fp8::sm90 {

constexpr int kSumAlign = 32;  // groups of the sum begin at multiples of one instruction's worth: none holds two groups

// Whether types, the strides of b and the scales are such that these kernels take the product, of operands and out at
// 16-byte boundaries, of a K and an N that are multiples of 16 and, in 2D x 2D, of offs that are multiples of 32.
bool takes_operands(const ScaledGroupedMmParams& p);
// Whether rows of a may be taken by index.
bool takes_index(const ScaledGroupedMmParams& p, bool fast);
// Whether the product adds to out itself, where it is one that `adds`.
bool takes_total(const ScaledGroupedMmParams& p, bool fast);
// Whether tiles should be dealt out by a counter. They may be, to the same bytes, wherever groups divide rows that are
// not taken by index, but not of MXFP8.
bool wants_counter(const ScaledGroupedMmParams& p);
// What the product needs beside, at a multiple of 16 bytes.
int64_t scratch_bytes(const ScaledGroupedMmParams& p, bool counter);
// 0, or the runtime's error code.
int grouped_gemm(const ScaledGroupedMmParams& p, bool fast, bool counter, void* scratch, void* stream);

}  // namespace moe_fp8::sm90
