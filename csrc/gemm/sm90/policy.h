// Constants that were tuned on an H200, each with its trade-off. docs/kernels/gemm.md has the measurements.
#pragma once
#include <cstdint>

namespace moe_fp8::sm90 {

// ---- tiles ----------------------------------------------------------------------------------------------------------
// A tile of fast sums keeps 128 x 256 float32 in the registers of two warpgroups. A promoted tile keeps sums and the
// products of a stage, 256 x 128 and 128 x 128. One scale per column of b leaves registers for 96 columns only.
constexpr int kFastTileM = 128, kFastTileN = 256;
constexpr int kPromotedTileM = 256, kPromotedTileN = 128, kColumnScalesTileN = 96;
constexpr int kTileK = 128;     // elements of K in a stage of FP8: the block of a scale, and the width of the swizzle
constexpr int kRasterRows = 8;   // pairs of tiles; L2 reuse of a against b. 8 to 16 are equal within the noise

// ---- pipeline -------------------------------------------------------------------------------------------------------
constexpr int kStages = 4;                 // 227 KB of shared memory hold no fifth stage next to the epilogue's staging
constexpr int kSplitStages = kStages / 2;  // stages of a tile if two hold its whole K: 231 us instead of 252 (K = 256)
// The power of two above the tiles in flight: one is stored while two fill the halves of a split pipeline. The planner
// of a K-grouped product works as many tiles ahead.
constexpr int kTileSlots = 4;

// ---- roles ----------------------------------------------------------------------------------------------------------
constexpr int kConsumers = 2;    // warpgroups, which share the tensor cores: one multiplies while the other one scales
constexpr int kGatherWarps = 2;  // warps that copy rows of a by index; the other two of the warpgroup have other roles
// Registers of a thread after the roles have split. Accumulators take all that producers can do without: with 40 and
// 232 producers spill 4 to 12 bytes.
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

// ---- scheduling -----------------------------------------------------------------------------------------------------
// Cost of storing a tile of a K-grouped product, in steps of 32 elements of K, for LongestFirstScheduler: a store of
// 128 x 256 took about 3,700 cycles, a step 275, and twice as long in bfloat16.
constexpr int kStoreCost = 14, kMxStoreCost = 7;
// A DynamicScheduler keeps the tiles in flight in the L2 but costs one more launch, which zeroes its counter. It won
// from these sizes on, up to 10%.
constexpr int64_t kMinDynamicK = 4096, kMinDynamicRounds = 8;
// Gathering rows in the kernel costs 2 to 10% of the product. Copying them before the product costs less the more
// columns there are. Both take equally long between N = 2048 (gather 0.98 to 1.01 of the copy) and 3072 (1.005).
constexpr int64_t kMaxGatherN = 2560;

}  // namespace moe_fp8::sm90
