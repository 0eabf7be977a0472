// The units of Hopper's kernels: pairs of tiles of one group, for clusters of two blocks.
//
// A pair is 256 rows and as many columns or fewer, which read the same rows of one operand; each block copies half of
// those for both. A pair never straddles groups.
//
//            columns ->
//   pair 0   [unit 0][unit 3]
//   pair 1   [unit 1][unit 4]
//   pair 2   [unit 2][unit 5]
//
// Tiles of 128 rows lie one below the other and share rows of B; where the last rows of a group are one such tile, the
// pair is two of them beside one another, twice as many columns, and shares the rows of A. Tiles of 256 rows always lie
// beside one another.
#pragma once
#include "gemm/schedule/tile.h"
#include "gemm/sm90/args.h"

namespace moe_fp8::sm90 {

static_assert(kDepth == kGroupScales);
constexpr int kPairRows = 256;
constexpr int kBand = 8;  // pairs; 8 to 16 of them are equal within the noise on an H200

// The units of a group of so many rows.
template <class T>
struct PairUnits {
  static constexpr bool kBeside = T::kTileRows == kPairRows;
  int pairs, rest;  // rows of units, and units of the last rows behind them
  int across;       // units in a row

  MOE_HD PairUnits(const typename T::Args& p, int rows) {
    if constexpr (kBeside) {
      pairs = ceil_div(rows, kPairRows);
      across = ceil_div(p.N, 2 * T::kTileColumns);
      rest = 0;
    } else {
      const int left = rows % kPairRows;
      pairs = rows / kPairRows + (left > T::kTileRows);
      across = ceil_div(p.N, T::kTileColumns);
      rest = left > 0 && left <= T::kTileRows ? ceil_div(across, 2) : 0;
    }
  }
  MOE_HD int count() const { return pairs * across + rest; }

  MOE_HD gemm::Place place(int unit, int rank) const {
    const int in_rest = unit - pairs * across;
    if (!kBeside && in_rest >= 0) return {2 * pairs, 2 * in_rest + rank, true};
    const gemm::Place pair = gemm::in_bands(unit, pairs, across, kBand);
    if (kBeside) return {pair.row, 2 * pair.column + rank, true};
    return {2 * pair.row + rank, pair.column};
  }
};

// And where it is in operands and out of all groups.
struct Tile : gemm::Tile {
  int row, row_of_b;

  template <class T>
  static MOE_DEVICE Tile of(const typename T::Args& p, const gemm::Tile& tile) {
    return {tile, tile.row_of_a + (T::kSumGroups ? tile.expert * p.M : 0),
            tile.column + (T::kSumGroups ? 0 : tile.expert * p.expert_rows)};
  }
};

}  // namespace moe_fp8::sm90
