// The shared memory of a block: the ring of stages, tile slots, and the barriers between the roles of warps.
//
//   warp   threads   role             registers
//   0      1         operands         kProducerRegisters   TMA boxes of a and b
//   1      1 or 32   scales                                block scales take the whole warp
//   2, 3   64        gather warps                          rows of a, if taken by index
//   3      1 or 32   planner                               in place of a gather warp, if has_planner()
//   4-7    128       consumer 0       kConsumerRegisters   wgmma, scaling, epilogue
//   8-11   128       consumer 1
//
//            stage_empty[s]: from the consumers of both blocks, because multicast fills the stages of both
//        +----------------------------------------------------------------------------------------------+
//        v                                                                                              |
//   operands, scales, gather warps --- stage_full[s]: a[s], b[s], scale_a, scale_b, tiles[slot] ---> consumers ---> out
//        ^                                                                                              |
//        | tile_full[slot]                tile_empty[slot]: all consumers have left the tile            |
//        +------------------- planner <-----------------------------------------------------------------+
//                                ^
//                                | work_full[slot]: block 0 of the cluster drew a work unit for both blocks
//
// Without a planner, every producer finds its tiles itself and the operand producer writes the slot. work_full serves
// the dynamic scheduler alone: the planner of block 0 sends the index of the work unit to both planners.
//
// Every tile begins at the first stage, so that all addresses are constants in the unrolled passes over the ring. The
// stages that a tile's last pass does not need are padding: producers and consumers arrive at their barriers, and
// nothing is loaded. If half the ring holds a tile's whole K, the pipeline is split: tiles use the halves alternately,
// and the next tile is loaded while this one is multiplied.
#pragma once
#include "gemm/sm90/tile_pairs.h"
#include "platform/clusters.h"
#include "platform/convert.h"
#include "platform/launch.h"
#include "platform/memory.h"
#include "platform/tma.h"
#include "platform/wgmma.h"

namespace moe_fp8::sm90 {

constexpr int kThreads = 128 * (1 + kConsumers), kConsumerWarps = 4 * kConsumers;
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;  // of a thread; setmaxnreg only redistributes these
static_assert(128 * (kProducerRegisters + kConsumers * kConsumerRegisters) <= kThreads * kLaunchRegisters);
constexpr int kSwizzledRows = 8, kStageAlignment = kSwizzledRows * kRowBytes;  // the swizzle repeats after these

template <class T>
struct SharedStorage {
  uint8_t a[kStages][T::kStageBytesA];
  uint8_t b[kStages][T::kStageBytesB];
  typename T::Epilogue::template Storage<T> epilogue;  // at a multiple of 1024 bytes
  //   row scales     scale_b: column scales, per tile slot. Consumers load row scales from global memory
  //   block scales   both, per stage; a square of b has one scale. scale_a begins at a row of a that is a multiple of
  //                  4, at most 3 rows before the first row of the tile
  //   kMx            scale_a: the bytes of four blocks of a, in every even stage
  float scale_a[T::kBlockScales || T::kMx ? kStages : 1][T::kTileM + 4];
  float scale_b[T::kBlockScales ? kStages : kTileSlots][T::kBlockScales && !T::kColumnScales ? 1 : T::kTileN];
  // Gathered rows: row kSwizzledRows * j + i of the tile begins row_source[i][j] * 16 bytes after the first row of a.
  alignas(16) uint32_t row_source[kSwizzledRows][T::kTileM / kSwizzledRows];
  Tile tiles[kTileSlots];  // a slot is written before the first stage of its tile is full
  uint64_t stage_full[kStages], stage_empty[kStages];
  uint64_t tile_full[kTileSlots], tile_empty[kTileSlots], work_full[kTileSlots];
  uint32_t work_index[kTileSlots];  // the index of the work unit that block 0 drew
  gemm::GroupOffsets groups;
};

template <class T>
MOE_DEVICE int k_tiles(const Tile& tile) { return ceil_div(tile.k_size, T::kStageK); }
template <class T>
MOE_DEVICE bool splits_pipeline(const Args& p) { return T::kFastMGrouped && p.K <= kSplitStages * kTileK; }
template <class T>
MOE_DEVICE int first_stage(const Args& p, int slot) { return splits_pipeline<T>(p) ? slot % 2 * kSplitStages : 0; }
// Stages that a tile occupies, padding included. Never 0, because a tile slot is read once the first stage is full.
template <class T>
MOE_DEVICE int tile_stages(const Args& p, const Tile& tile) {
  return splits_pipeline<T>(p) ? kSplitStages : tile.k_size > 0 ? round_up(k_tiles<T>(tile), kStages) : kStages;
}

template <class T>
MOE_HD bool schedules_dynamically(const Args& p) { return !T::kKGrouped && !T::kMx && p.unit_counter != nullptr; }
template <class T>
MOE_HD bool has_planner(const Args& p) { return T::kKGrouped || schedules_dynamically<T>(p); }

template <class T>
MOE_HD bool gathers_rows(const Args& p) { return T::kFastMGrouped && p.row_index.at != nullptr; }
constexpr uint32_t kNoRow = UINT32_MAX;  // in row_source: a row of zeros
// Arrivals that fill a stage: one from each producer, and one from every thread of the gather warps.
template <class T>
MOE_DEVICE int producer_arrivals(const Args& p) { return gathers_rows<T>(p) ? 2 + 32 * kGatherWarps : 2; }

MOE_DEVICE int up_to(int count, int max) { return count < max ? count : max; }

}  // namespace moe_fp8::sm90
