// Grouped products on any GPU with matrix instructions: mma.sync on NVIDIA, MFMA on AMD.
#pragma once
#include "gemm/scaled_grouped_mm.h"

namespace moe_fp8::mma {

enum class Types;

// Takes any sizes, alignments and offsets. fast: with row scales the tensor cores may accumulate all of K, in fewer
// bits than float32 on some chips. Returns 0 or the runtime's error code.
int grouped_gemm(const ScaledGroupedMmParams& p, bool fast, void* stream);

// kBlock: elements of K under one scale; 0: row scales. Each instance has a file in instances/.
template <int kBlock>
int launch_gemm(Types types, const ScaledGroupedMmParams& p, void* stream);

}  // namespace moe_fp8::mma
