// Tuned constants of the kernels of adapters. The figures are of an H200 (sm_90a): 8,192 tokens of 2,048 columns, 128
// experts, 8 slots a token, rank 16. docs/kernels/low_rank.md has more. A constant without a figure is only known to
// keep every kernel free of spills.
#pragma once

namespace moe_fp8 {

// ---- narrow_tokens(): a block has a window of rows, and its warps share the columns of x ---------------------------

constexpr int kNarrowWarps = 4;   // 4 warps 73 us, 8 warps 74
constexpr int kNarrowRows = 32;   // of a window: 32 rows 73 us, 16 rows 82, 64 rows 90

// Resident blocks, against registers: a lane holds sums of `ranks` columns, and loads of two steps along W. With loads
// of one step and 6 blocks, it took 110 us.
constexpr int narrow_blocks(int ranks) { return ranks <= 16 ? 4 : 3; }

// ---- outer_tokens(): a block has 8 pieces of 16 bytes of an expert's rows, and its warps share the rows -------------

// 4 warps and 6 blocks 111 us, 8 warps and 3 blocks 126. If few experts have most rows, 129 and 124.
constexpr int kOuterWarps = 4;

// Resident blocks, against registers: a lane holds sums * 2 sums. 4 blocks at 16, which is rank 16, took 132 us.
constexpr int outer_blocks(int sums) { return sums <= 16 ? 6 : 4; }

// ---- cast_factor() --------------------------------------------------------------------------------------------------

constexpr int kFactorThreads = 256;
constexpr int kFactorVector = 8;        // elements that a thread casts at once, if m and out have the same order
constexpr int kFactorTileLog2 = 12;     // elements of a tile that is transposed; each is one word of shared memory
constexpr int kMinFactorSideLog2 = 4;   // of a tile: a rank of 16 fills it
constexpr int kFactorBlocks = 4;        // resident blocks of vectors
constexpr int kFactorTileBlocks = 6;    // resident blocks of tiles
constexpr int kFactorLoads = 8;         // in flight a thread of a tile; with 16, sm_100a and sm_120 spill at 3 blocks

}  // namespace moe_fp8
