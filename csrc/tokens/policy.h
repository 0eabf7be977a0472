// Tuned constants of the token kernels. docs/kernels/tokens.md has the figures, all of an H200 (sm_90a). A constant
// without a figure is only known to keep every kernel free of spills.
#pragma once
#include <cstdint>

#include "platform/compiler.h"

namespace moe_fp8 {

// ---- choose_experts(), choose_experts_backward(): blocks of 256 threads ---------------------------------------------

// Resident blocks of choose_experts(), against registers: a lane holds its share of the experts.
MOE_HD constexpr int choose_experts_blocks(int experts) {
  return experts <= 128 ? 6 : experts <= 256 ? 4 : experts <= 512 ? 3 : 2;
}
// Resident blocks of choose_experts_backward(). A lane has per_lane experts, or one slot.
MOE_HD constexpr int choose_experts_backward_blocks(int per_lane) {
  return per_lane == 1 ? 8 : per_lane == 4 ? 4 : per_lane == 8 ? 3 : per_lane == 16 ? 2 : 1;
}

// ---- sort_tokens(), tokens_by_rank() and kernels that build a table of groups ---------------------------------------

constexpr int kSortThreads = 1024;
constexpr int kSortSlots = 8;                         // ids in flight a lane, against registers
constexpr int64_t kMinSlotsPerBlock = kSortThreads;   // at least one id a thread: few slots take few blocks
constexpr int kTokensByRankThreads = 256;
constexpr int kTokensByRankBlocks = 4;                // a multiprocessor; every block adds to all global counts
constexpr int kTableThreads = 256;
constexpr int kTableRowsPerThread = 4;                // spreads the cost of the table that each block builds
constexpr int kInvertThreads = 256;

// ---- combine(), combine_backward() ----------------------------------------------------------------------------------

constexpr int kCombineThreads = 256;
constexpr int kCombineSlots = 8;          // rows in flight a thread, against registers
constexpr int kCombineBlocks = 3;         // resident blocks; each takes token after token: 636 us, not 747
constexpr int kCombineBackwardSlots = 4;  // rows in flight a thread, against registers
constexpr int kCombineBackwardBlocks = 3, kCombineBackwardBlocksF16 = 2;  // float16 conversions take more registers

// ---- copy_rows(), pack_tokens(), permute_quantized() ----------------------------------------------------------------

// Bytes of a row segment, if rows go to several places: all rows of a segment are copied before the next one, so that
// the L2 still holds them when they are read again. 256 bytes 381 us, 512 bytes 450, whole rows 517.
constexpr int64_t kSegmentBytes = 256;
constexpr int kUnitsInFlight = 2;         // a thread: 0.99 and 0.97 of a copy; 4 units 0.98 and 0.95, 1 unit 0.88, 0.92
constexpr int kShortRowThreads = 256;     // of a block of rows that take fewer threads
constexpr int kMaxSegmentThreads = 1024;  // that share a row

constexpr int kPermuteThreads = 256;
constexpr int kPermuteBlocks = 8;         // resident blocks: copies need bytes in flight
constexpr int kScaleWords = 4;            // of a row in flight a thread: one 16-byte load if they are neighbours
constexpr int kScaleWordsPerThread = 2 * kScaleWords;
constexpr int kScaleBlocks = 8;           // blocks of scales a multiprocessor: each builds a table of the groups

// ---- quantize_and_pack() --------------------------------------------------------------------------------------------

constexpr int kPackThreads = 128;         // of a token
constexpr int kPackBlocks = 10;           // resident blocks
constexpr int kPackElements = 16;         // cast at once by a thread, for stores of 16 bytes: 148 us; of 8 bytes 160

}  // namespace moe_fp8
