// Compile-time choices that distinguish the kernel's instances.
#pragma once
#include <type_traits>

#include "gemm/schedule/tile_scheduler.h"
#include "gemm/sm90/args.h"
#include "gemm/sm90/policy.h"

namespace moe_fp8::sm90 {

constexpr int kRowBytes = 128;  // of a row of b in a stage: the width of the swizzle
static_assert(kTileK == kBlock && kTileK == kGroupScales, "a stage is one scaling block");

template <class T>
struct PairUnits;  // tile_pairs.h

template <Scales kScales, Grouped kGrouped, Fp8Type kA, class Epilogue_>
struct Traits {
  using Args = sm90::Args;
  using Epilogue = Epilogue_;
  using KernelArgs = sm90::KernelArgs<Epilogue>;
  using Units = PairUnits<Traits>;
  using Scheduler = std::conditional_t<kGrouped == Grouped::kK, gemm::LongestFirstScheduler<Traits>,
                                       gemm::StaticScheduler<Traits>>;
  static constexpr bool kE5M2 = kA == Fp8Type::kE5M2;  // type of a; b is E4M3
  static constexpr bool kKGrouped = kGrouped == Grouped::kK;
  static constexpr bool kMx = kScales == Scales::kMx;
  static constexpr bool kPromoted = kScales != Scales::kRows && !kMx;
  static constexpr bool kFastMGrouped = kScales == Scales::kRows && !kKGrouped;
  static constexpr bool kBlockScales = kPromoted && kScales != Scales::kRowsPromoted;
  static constexpr bool kColumnScales = kScales == Scales::kBlocks && kKGrouped;  // b has a scale per column and stage
  static constexpr int kTileM = kPromoted ? kPromotedTileM : kFastTileM;
  static constexpr int kTileN = !kPromoted ? kFastTileN : kColumnScales ? kColumnScalesTileN : kPromotedTileN;
  static constexpr int kBoxN = kPromoted ? kTileN : kTileN / 2;  // rows of b in a TMA box
  static constexpr int kElementBytesB = kMx ? 2 : 1;
  static constexpr int kStageK = kTileK / kElementBytesB;  // elements of K in a stage
  static constexpr int kStageBytesA = kTileM * kStageK, kStageBytesB = kTileN * kRowBytes;
  static constexpr int kOffsAlign = sm90::kOffsAlign, kStoreCost = kMx ? kMxStoreCost : sm90::kStoreCost;
  static MOE_HD constexpr bool k_grouped(const Args&) { return kKGrouped; }
};

}  // namespace moe_fp8::sm90
