// Constants that were tuned on an H200, each with its trade-off. docs/kernels/gemm.md has the measurements.
#pragma once
#include "platform/memory.h"
#include "platform/mma.h"

namespace moe_fp8::mma {

// Two blocks of four waves share a multiprocessor: while one waits, the other multiplies. Three or four blocks of tiles
// half as wide reached 350 TFLOPS instead of 413.
constexpr int kThreads = 4 * kPatchWave, kBlocksPerMultiprocessor = 2;
// Rows and columns of out per wave. Block scales need two sets of sums. AMD's chips have the registers for both; on
// NVIDIA's chips, tiles are half as wide.
constexpr int kWaveM = 64, kWaveN = 64, kBlockScalesWaveN = kPatchWave == 32 ? 32 : 64;
// Stages in shared memory. Three or four gained 2% or less, and stages twice as deep do not fit the 100 KB of sm_86,
// sm_89 and sm_120. Where copies pass through registers, one stage is enough.
constexpr int kStages = kHasAsyncCopies ? 2 : 1;
constexpr int kStagePatches = 2;  // patches along K in a stage
constexpr int kRasterRows = 16;   // tiles; L2 reuse of a against b; no other size was measured
constexpr int kTileSlots = 3;     // slow waves may still read the previous tile when the next one is written

}  // namespace moe_fp8::mma
