// Compile-time choices that distinguish the kernel's instances.
#pragma once
#include "gemm/mma/policy.h"
#include "gemm/schedule/tile_scheduler.h"
#include "gemm/scaled_grouped_mm.h"

namespace moe_fp8::mma {

// Types of the operands. kE4M3, kE5M2: the type of a; b is E4M3, and both are of the flavour (FN or FNUZ) that the chip
// has instructions for. kAny: any two of the four FP8 types, converted one by one through tables.
enum class Types { kE4M3, kE5M2, kAny };

// The work units of a group with `rows` rows: single tiles.
template <class T>
struct TileUnits {
  int height, width;

  template <class Args>
  MOE_HD TileUnits(const Args& p, int rows)
      : height(ceil_div(rows, T::kTileM)), width(ceil_div(int(p.N), T::kTileN)) {}
  MOE_HD int count() const { return height * width; }
  MOE_HD gemm::TileCoord tile(int unit, int) const { return gemm::rasterize(unit, height, width, kRasterRows); }
};

// kBlock_: elements of K under one scale; 0: row scales. Instruction: Unscaled or Scaled of platform/mma.h; Scaled is
// for blocks of 32. Epilogue: handles the sums, see epilogue/store_or_add.h.
template <Types kTypes_, int kBlock_, class Instruction_, class Epilogue_>
struct Traits {
  using Args = ScaledGroupedMmParams;
  using Units = TileUnits<Traits>;
  using Scheduler = gemm::StaticScheduler<Traits>;
  using Instruction = Instruction_;
  using Epilogue = Epilogue_;
  static constexpr Types kTypes = kTypes_;
  static constexpr int kBlock = kBlock_;
  static constexpr bool kTakesScales = Instruction::kTakesScales;
  static constexpr int kStagePatches = kTakesScales ? 1 : mma::kStagePatches;
  static constexpr int kStageK = kStagePatches * Instruction::kDepth;           // elements of K in a stage
  static constexpr int kChunks = kStageK / 16;                                  // 16-byte chunks of a row in a stage
  static constexpr int kStageScales = kBlock == kMxBlock ? kStageK / kMxBlock : 1;  // scales of a row in a stage
  static constexpr int kStagesPerScale = kBlock > kStageK ? kBlock / kStageK : 1;
  using Scale = std::conditional_t<kTakesScales, uint8_t, float>;
  static constexpr int kWaveN = kBlock > 0 ? kBlockScalesWaveN : mma::kWaveN;
  static constexpr int kTileM = 2 * kWaveM, kTileN = 2 * kWaveN;  // two waves by two
  static constexpr int kStages = mma::kStages;
  // With two stages, a stage is refilled while the sums of its former operands still wait for their scales.
  static constexpr int kScaleSlots = kStages == 1 ? 1 : 3;
  static constexpr int kOffsAlign = 1;
  static MOE_HD bool k_grouped(const Args& p) { return p.k_grouped; }

  static constexpr bool kTakesFp8 = kTypes != Types::kAny && kMultipliesFp8;  // instructions take FP8 as it is
  static constexpr bool kUsesTables = !kTakesFp8 && (kTypes == Types::kAny || !kImplementsFp8ToHalf);
  // Patches of a stage that are unrolled: all, unless scales per patch and chunks in registers leave no room.
  static constexpr int kUnrolledPatches = kBlock == kMxBlock && kStages == 1 ? 1 : kStagePatches;
  static_assert(!kTakesScales || (kBlock == kMxBlock && kTypes != Types::kAny));
  static_assert(!kTakesScales || (kWaveM == 64 && kWaveN == 64), "a lane's scales are the bytes of a word");
};

}  // namespace moe_fp8::mma
