// What the roles of a block share. A block is a producer, one thread that starts all copies, and two warpgroups of
// consumers, which have 64 rows of a tile each. Stages of 128 elements of the sum go round in shared memory; every tile
// begins at the first stage, so that the addresses of all are constants in the unrolled rounds. What is missing of a
// tile's last round are empty stages, armed and released but not loaded.
#pragma once
#include "gemm/sm90/schedule.h"
#include "platform/clusters.h"
#include "platform/convert.h"
#include "platform/launch.h"
#include "platform/memory.h"
#include "platform/tma.h"
#include "platform/wgmma.h"

namespace moe_fp8::sm90 {

enum class Scales { kRows, kBlocks };

template <Grouped kGrouped_, Scales kScales_, bool kFloat_>
struct Traits {
  static constexpr Grouped kGrouped = kGrouped_;
  static constexpr Scales kScales = kScales_;
  static constexpr bool kFloat = kFloat_;  // out, otherwise bfloat16
  static constexpr bool kSumGroups = kGrouped == Grouped::kSum, kBlockScales = kScales == Scales::kBlocks;
  static_assert(!kSumGroups || !kBlockScales);  // products of two scales an element take more registers than there are
};

constexpr int kStages = 4;
constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers);
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;  // 40 and 232 spill the producer of blocks
constexpr int kStageBytesA = kTileRows * kDepth, kStageBytesB = kTileColumns * kDepth;
constexpr int kStageAlignment = 1024;  // 8 rows: the pattern in which 128-byte rows are swizzled

struct Args {
  CUtensorMap a, a_half, b_half;  // boxes of 128 and 64 rows of a, of 128 rows of b
  const float* scale_a;
  const float* scale_b;
  const int* offs;
  void* out;
  int M, N, K, E;
  int scale_a_stride;             // of blocks: between those of one row of a
};

struct Shared {
  uint8_t a[kStages][kStageBytesA];
  uint8_t b[kStages][kStageBytesB];
  uint8_t staging[4 * kConsumers][2048];  // of a warp: 16 rows of 128 bytes on their way out
  float scale_a[kStages][kTileRows + 4];  // of blocks; from the row before the tile's first that is a multiple of 4
  float scale_b[kStages][2][4];           // of blocks: of either half of the columns, from a 16-byte boundary on
  float of_columns[2][kTileColumns];      // scales of rows of b, of tiles in turn
  Tile tiles[2];  // in turn; written before the first stage of a tile is full
  uint64_t full[kStages], empty[kStages];
  GroupBounds groups;
};

MOE_DEVICE int steps_of(const Tile& tile) { return ceil_div(tile.depth, kDepth); }
MOE_DEVICE int rounds_of(const Tile& tile) {  // one at least, for a tile comes with its first stage
  return tile.depth > 0 ? ceil_div(steps_of(tile), kStages) : 1;
}

MOE_DEVICE int up_to(int count, int most) { return count < most ? count : most; }

}  // namespace moe_fp8::sm90
