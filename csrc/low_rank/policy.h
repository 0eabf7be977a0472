// Tuned constants of the kernels for factors of adapters. A constant without a figure is only known to keep every
// kernel free of spills.
#pragma once

namespace moe_fp8 {

// ---- cast_factor() --------------------------------------------------------------------------------------------------

constexpr int kFactorThreads = 256;
constexpr int kFactorVector = 8;        // elements that a thread casts at once, if m and out have the same order
constexpr int kFactorTileLog2 = 12;     // elements of a tile that is transposed; each is one word of shared memory
constexpr int kMinFactorSideLog2 = 4;   // of a tile: a rank of 16 fills it
constexpr int kFactorBlocks = 4;        // resident blocks; a thread has 16 loads in flight

}  // namespace moe_fp8
