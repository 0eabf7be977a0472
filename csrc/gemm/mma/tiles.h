// Grouped products on any GPU with matrix instructions: what a kernel is, and what its blocks share.
//
// A block of four waves, two below and two beside one another, takes tile after tile. Stages of 64 elements of the sum,
// or 128 where instructions take scales, go round in shared memory. Two blocks share a multiprocessor: while one waits,
// the other multiplies.
#pragma once
#include "gemm/scaled_grouped_mm.h"
#include "gemm/schedule/tile.h"
#include "platform/mma.h"

namespace moe_fp8::mma {

constexpr int kThreads = 4 * kPatchWave, kBlocks = 2;  // of a multiprocessor
constexpr int kWaveRows = 64;
constexpr int kBand = 16;                              // tiles

// What operands are made of. a of E4M3 or E5M2 and b of E4M3, in the flavour that the chip has instructions for; or any
// two of the four types, whose values are looked up in a table, one by one.
enum class Types { kE4M3, kE5M2, kAny };

template <class T>
struct TileUnits {
  int height, across;

  template <class Args>
  MOE_HD TileUnits(const Args& p, int rows)
      : height(ceil_div(rows, T::kTileRows)), across(ceil_div(int(p.N), T::kTileColumns)) {}
  MOE_HD int count() const { return height * across; }
  MOE_HD gemm::Place place(int unit, int) const { return gemm::in_bands(unit, height, across, kBand); }
};

// kBlock_: elements of the sum under a scale; 0: scales are of rows. Instruction: of platform/mma.h; Scaled is for
// blocks of 32.
template <Types kTypes_, int kBlock_, class Instruction_>
struct Traits {
  using Args = ScaledGroupedMmParams;
  using Units = TileUnits<Traits>;
  using Deal = gemm::InRounds<Traits>;
  using Instruction = Instruction_;
  static constexpr Types kTypes = kTypes_;
  static constexpr int kBlock = kBlock_;
  static constexpr bool kTakesScales = Instruction::kTakesScales;
  static constexpr int kSteps = kTakesScales ? 1 : 2, kDepth = kSteps * Instruction::kDepth;  // of the sum in a stage
  static constexpr int kChunks = kDepth / 16;                                                 // 16 bytes of a row
  static constexpr int kScales = kBlock == kMxBlock ? kDepth / kMxBlock : 1;  // of a row in a stage
  static constexpr int kStagesOfScale = kBlock > kDepth ? kBlock / kDepth : 1;
  using Scale = std::conditional_t<kTakesScales, uint8_t, float>;
  // Sums of blocks take twice the registers, of which AMD's chips have twice as many.
  static constexpr int kWaveColumns = kBlock > 0 && kPatchWave == 32 ? 32 : 64;
  static constexpr int kTileRows = 2 * kWaveRows, kTileColumns = 2 * kWaveColumns;
  static constexpr int kStages = kCopiesInBackground ? 2 : 1;
  // Of two stages, one is filled while sums of its operands still wait for their scales.
  static constexpr int kScaleStages = kStages == 1 ? 1 : 3;
  static constexpr int kSumAlign = 1;
  static MOE_HD bool of_sum(const Args& p) { return p.groups_of_sum; }

  // Whether the values of operands are looked up.
  static constexpr bool kMultipliesBytes = kTypes != Types::kAny && kMultipliesFp8;
  static constexpr bool kLooksUp = !kMultipliesBytes && (kTypes == Types::kAny || !kHalvesFp8);
  // All patches of a stage at once, but where scales of each, and chunks that wait, leave no registers for that.
  static constexpr int kUnrolled = kBlock == kMxBlock && kStages == 1 ? 1 : kSteps;
  static_assert(!kTakesScales || (kBlock == kMxBlock && kTypes != Types::kAny));
  static_assert(!kTakesScales || (kWaveRows == 64 && kWaveColumns == 64), "a lane's scales are the bytes of a word");
};

template <class T>
struct Shared {
  Vec16 a[T::kStages][T::kTileRows * T::kChunks], b[T::kStages][T::kTileColumns * T::kChunks];
  typename T::Scale scale_a[T::kScaleStages][T::kScales][T::kBlock ? T::kTileRows : 1];
  typename T::Scale scale_b[T::kScaleStages][T::kScales][T::kBlock ? T::kTileColumns : 1];
  gemm::GroupBounds groups;
  gemm::Tile tiles[3];  // in turn; when one is written, slow waves may still read the one before the last
  uint16_t half[2][256];  // what the bytes of a and of b stand for, where they are looked up
};

// Where a chunk of a row lies: rows that lanes read together are in different banks.
template <class T>
MOE_DEVICE int place_of(int row, int chunk) {
  return row * T::kChunks + (chunk ^ (T::kChunks == 8 ? row >> 1 & 7 : (row >> 1 & 1) << 1 | (row >> 2 & 1)));
}
// Where the scale of a row of a, or of a position of b, lies in those of a block. What instructions take is beside one
// another: a lane's four, 16 rows apart, are a word.
template <class T>
MOE_DEVICE int place_of_scale(int row) {
  return T::kTakesScales ? row / 64 * 64 + row % 16 * 4 + row / 16 % 4 : row;
}
// The column of a tile whose row of b lies at a position.
MOE_DEVICE int column_of_b(int position) {
  return position / kPatchColumns * kPatchColumns + column_of_position(position % kPatchColumns);
}

// Where the scales of a stage lie.
template <class T>
MOE_DEVICE int place_of_scales(int step) { return step / T::kStagesOfScale % T::kScaleStages; }
template <class T>
MOE_DEVICE int steps_of(const gemm::Tile& tile) { return ceil_div(tile.depth, T::kDepth); }

}  // namespace moe_fp8::mma
