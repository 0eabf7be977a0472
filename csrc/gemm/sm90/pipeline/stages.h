// What the roles of a block share. A block is two producers, which start copies, two warps that copy rows of a where
// they are taken by index, one that plans tiles where groups divide the sum or a counter deals units out, and two
// warpgroups of consumers.
// Stages of 128 elements of the sum, of kMx 64, go round in shared memory; every tile begins at the first stage, so
// that the addresses of all are constants in the unrolled rounds. What is missing of a tile's last round are empty
// stages, armed and released but not loaded. Where half a round holds the whole sum, tiles take its halves in turns, so
// that the next one is loaded while this one is multiplied: of K = 256 to N = 1536 in a layer on an H200 231 us,
// otherwise 252.
#pragma once
#include "gemm/sm90/tile_schedule.h"
#include "platform/clusters.h"
#include "platform/convert.h"
#include "platform/launch.h"
#include "platform/memory.h"
#include "platform/tma.h"
#include "platform/wgmma.h"

namespace moe_fp8::sm90 {

constexpr int kStages = 4, kHalf = kStages / 2;
// A power of two above the tiles that are known at once: one is stored, two take halves. As many of sums are planned.
constexpr int kTurns = 4;
constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers);
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
constexpr int kRegisters = 65536 / kThreads / 8 * 8;  // of a thread at the launch; more never come
static_assert(128 * (kProducerRegisters + kConsumers * kConsumerRegisters) <= kThreads * kRegisters);
constexpr int kSwizzledRows = 8, kStageAlignment = kSwizzledRows * kDepth;  // the pattern in which rows are swizzled

template <class T>
struct Shared {
  uint8_t a[kStages][T::kStageBytesA];
  uint8_t b[kStages][T::kStageBytesB];
  uint8_t staging[4 * kConsumers][2048];  // of a warp: 16 rows of 128 bytes on their way out
  // Scales: of rows, for tiles in turn the columns'; of blocks, for every stage both operands', of squares one of b.
  // Those of a begin at the row before the tile's first that is a multiple of 4. Of kMx, for every other stage a's of
  // four blocks, as bytes.
  float scale_a[T::kBlockScales || T::kMx ? kStages : 1][T::kTileRows + 4];
  float scale_b[T::kBlockScales ? kStages : kTurns][T::kBlockScales && !T::kColumnScales ? 1 : T::kTileColumns];
  // Of rows that are taken by index: where row kSwizzledRows * j + i begins, in chunks of 16 bytes, at [i][j].
  alignas(16) uint32_t source[kSwizzledRows][T::kTileRows / kSwizzledRows];
  Tile tiles[kTurns];  // in turn; written before the first stage of a tile is full
  uint64_t full[kStages], empty[kStages];
  // Of tiles that are planned: it is in its place; all consumers leave it, by a counter those of both blocks, of which
  // the first is told. And the numbers that are drawn behind them, with barriers that say they have arrived.
  uint64_t known[kTurns], done[kTurns], arrived[kTurns];
  uint32_t drawn[kTurns];
  gemm::GroupBounds groups;
};

template <class T>
MOE_DEVICE int steps_of(const Tile& tile) { return ceil_div(tile.depth, T::kStageDepth); }
// Whether tiles take half a round: all sums are short.
template <class T>
MOE_DEVICE bool by_halves(const Args& p) { return T::kFastRows && p.K <= kHalf * kDepth; }
template <class T>
MOE_DEVICE int first_stage(const Args& p, int turn) { return by_halves<T>(p) ? turn % 2 * kHalf : 0; }
template <class T>
MOE_DEVICE int stages_of(const Args& p, const Tile& tile) {  // some, for a tile comes with its first stage
  return by_halves<T>(p) ? kHalf : tile.depth > 0 ? round_up(steps_of<T>(tile), kStages) : kStages;
}

// Whether units are drawn from a counter, and whether tiles are planned at all.
template <class T>
MOE_HD bool by_counter(const Args& p) { return !T::kSumGroups && !T::kMx && p.counter != nullptr; }
template <class T>
MOE_HD bool is_planned(const Args& p) { return T::kSumGroups || by_counter<T>(p); }

// Whether rows of a are taken by index: then two more warps copy them, every thread of which arrives.
template <class T>
MOE_HD bool by_index(const Args& p) { return T::kFastRows && p.index.at != nullptr; }
constexpr int kRowWarps = 2;
constexpr uint32_t kNoRow = UINT32_MAX;  // zeros instead
template <class T>
MOE_DEVICE int producers_of(const Args& p) { return by_index<T>(p) ? 2 + 32 * kRowWarps : 2; }

MOE_DEVICE int up_to(int count, int most) { return count < most ? count : most; }

}  // namespace moe_fp8::sm90
