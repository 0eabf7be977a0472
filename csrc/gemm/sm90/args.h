// What a launch gives the kernel, and which kernel it is.
#pragma once
#include <type_traits>

#include "gemm/schedule/tile_scheduler.h"
#include "gemm/sm90/grouped_gemm.h"
#include "numerics/groups.h"
#include "platform/tma.h"

namespace moe_fp8::sm90 {

constexpr int kDepth = 128;  // elements of the sum in a stage, of fp8, and under one scale of a block

// What groups divide: the rows of a and out (2D x 3D), or the sum, with an out for every group (2D x 2D).
enum class Grouped { kRows, kSum };

// Of rows: the tensor cores add up a tile's whole sum, 64 rows by 256 columns a warpgroup. Promoted: what they add up
// of a stage is added, in float32, to sums in other registers, so a warpgroup multiplies 64 rows at a time, twice a
// stage. Of blocks: promoted, times the scales of the stage. Those of b are of squares; where groups divide the sum
// they may be of its rows, so that every column of a tile has one of its own. Of blocks of 32, powers of two: consumers
// make bfloat16 of a and its scales, and b is bfloat16; the tensor cores add up whole sums.
enum class Scales { kRows, kRowsPromoted, kBlocks, kSquares, kMx };

struct Args {
  CUtensorMap a, b;  // boxes of 64 rows of a, unless they are taken by index, of kBoxColumns rows of b
  const float* scale_a;  // of kMx bytes, in the blocked layout
  const float* scale_b;
  const uint8_t* rows;  // of a, that are taken by index
  int64_t row_stride;
  RowIndex index;
  const int* offs;
  void* out;
  int M, N, K, E;
  int expert_rows;  // of b, from one expert to the next
  int element;  // bytes of one of out: 4, float32, or 2, bfloat16
  // Of blocks: between those of one row of a, of b or of its squares; how many there are of a row. Of kMx: the rows of
  // a, padded, and likewise.
  int scale_a_stride, scale_b_stride, scale_blocks;
  int* counter;  // at 0, from which units are drawn; null: they are dealt out in another way
};

template <class T>
struct PairUnits;  // schedule.h

template <Scales kScales, Grouped kGrouped, Fp8Type kA, bool kAdds_>
struct Traits {
  using Args = sm90::Args;
  using Units = PairUnits<Traits>;
  using Deal = std::conditional_t<kGrouped == Grouped::kSum, gemm::ByCost<Traits>, gemm::InRounds<Traits>>;
  static constexpr bool kE5M2 = kA == Fp8Type::kE5M2;  // a; b is E4M3
  static constexpr bool kAdds = kAdds_;  // to out, in 2D x 2D
  static constexpr bool kSumGroups = kGrouped == Grouped::kSum;
  static constexpr bool kMx = kScales == Scales::kMx;
  static constexpr bool kPromoted = kScales != Scales::kRows && !kMx;
  static constexpr bool kFastRows = kScales == Scales::kRows && !kSumGroups;
  static constexpr bool kBlockScales = kPromoted && kScales != Scales::kRowsPromoted;
  // Where every column has a scale of the stage, fewer of them leave registers for the products of scales.
  static constexpr bool kColumnScales = kScales == Scales::kBlocks && kSumGroups;
  static constexpr int kTileRows = kPromoted ? 256 : 128;
  static constexpr int kTileColumns = !kPromoted ? 256 : kColumnScales ? 96 : kDepth;
  static constexpr int kBoxColumns = kPromoted ? kTileColumns : kTileColumns / 2;  // rows of b in a copy
  static constexpr int kBytesB = kMx ? 2 : 1;  // of an element
  static constexpr int kStageDepth = kDepth / kBytesB;  // elements of the sum in a stage
  static constexpr int kStageBytesA = kTileRows * kStageDepth, kStageBytesB = kTileColumns * kDepth;
  // To store a tile of 128 x 256 took an H200 about 3,700 cycles, a step of 32 elements of its sum 275, in bfloat16
  // twice as long.
  static constexpr int kSumAlign = sm90::kSumAlign, kStoreCost = kMx ? 7 : 14;
  static MOE_HD constexpr bool of_sum(const Args&) { return kSumGroups; }
};

// Each in an instance file of its own. 0, or the runtime's error code.
template <Scales kScales, Fp8Type kA, bool kAdds>
int launch_gemm(const ScaledGroupedMmParams& p, int* counter, void* stream);

}  // namespace moe_fp8::sm90
