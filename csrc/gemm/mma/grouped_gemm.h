// Grouped products on any GPU with matrix instructions: tensor cores through mma.sync, MFMA.
#pragma once
#include "gemm/scaled_grouped_mm.h"

namespace moe_fp8::mma {

enum class Types;

// Any sizes, any alignment, any offsets. fast: whole sums of rows may be those of the tensor cores, in fewer bits than
// float32. 0, or the runtime's error code.
int grouped_gemm(const ScaledGroupedMmParams& p, bool fast, void* stream);

// For scales of blocks of so many elements of the sum, 0 of rows: each in an instance file of its own.
template <int kBlock>
int launch_gemm(Types types, const ScaledGroupedMmParams& p, void* stream);

}  // namespace moe_fp8::mma
