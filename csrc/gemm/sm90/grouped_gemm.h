// Grouped products on Hopper's tensor cores. gemm/scaled_grouped_mm.h defines operands, out and groups. a is
// float8_e4m3fn or float8_e5m2, b float8_e4m3fn; with MXFP8 scales a is float8_e4m3fn and b any of the FP8 types.
//
//   row scales      fast: the tensor cores accumulate all of K in their own precision, and the sums are scaled. Not
//                   fast: sums of 128 products are promoted, that is, added in float32 by rising k, and scaled at last
//   block scales    sums of 128 products are promoted, scaled and added in float32, by rising k. In a K-grouped product
//                   b may have scales of 128 x 128 squares, which allow wider tiles
//   MXFP8, blocked  values times scales are multiplied as bfloat16, and the tensor cores accumulate all of K. b is
//                   dequantized to scratch before the kernel, a inside it
//
// Rows behind the last group are zeros, and so is the out of an empty group along K, unless the product accumulates: it
// then leaves that out as it is. tile_pairs.h describes the work units; docs/kernels/gemm.md the measurements.
#pragma once
#include "gemm/scaled_grouped_mm.h"

namespace moe_fp8::sm90 {

constexpr int kOffsAlign = 32;  // groups along K begin at multiples of this, so that no instruction spans two groups

// Whether the kernels take the types, the strides of b and the scales. The caller checks the rest: operands and out at
// 16-byte boundaries, K and N multiples of 16, and offs of a K-grouped product multiples of kOffsAlign.
bool supports(const ScaledGroupedMmParams& p);
// Whether the kernel can gather rows of a by index.
bool can_gather_rows(const ScaledGroupedMmParams& p, bool fast);
// Whether a kernel can add the product to out itself.
bool can_accumulate(const ScaledGroupedMmParams& p, bool fast);
// Whether a kernel can add the low-rank term itself.
bool can_add_low_rank(const ScaledGroupedMmParams& p, bool fast);
// Whether a kernel can write out transposed itself.
bool can_transpose(const ScaledGroupedMmParams& p);
// Whether the dynamic scheduler is faster. It may be used for every M-grouped product without row index and MXFP8
// scales, and gives the same bytes.
bool prefers_dynamic_scheduler(const ScaledGroupedMmParams& p);
// Bytes of scratch that grouped_gemm needs, at a multiple of 16 bytes.
int64_t scratch_bytes(const ScaledGroupedMmParams& p, bool dynamic);
// dynamic: use the dynamic scheduler. Returns 0 or the runtime's error code.
int grouped_gemm(const ScaledGroupedMmParams& p, bool fast, bool dynamic, void* scratch, void* stream);

}  // namespace moe_fp8::sm90
