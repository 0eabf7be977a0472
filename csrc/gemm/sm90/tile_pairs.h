// The work units of Hopper's kernels: a pair of tiles of one group for a cluster of two blocks.
//
// A pair covers up to 256 rows. Its tiles read the same rows of one operand; each block copies half of these for both,
// by TMA multicast. A pair never straddles groups.
//
//            columns ->            column-major, kRasterRows pairs at a time
//   pair 0   [unit 0][unit 3]
//   pair 1   [unit 1][unit 4]
//   pair 2   [unit 2][unit 5]
//   rest     [    unit 6    ]      at most 128 rows are left: the two tiles are neighbours along N
//
// Tiles of 128 rows are neighbours along M and share rows of b. If the last rows of a group fit one such tile, its
// pairs are neighbours along N, twice as wide, and share rows of a. Tiles of 256 rows are always neighbours along N.
#pragma once
#include "gemm/schedule/tile_scheduler.h"
#include "gemm/sm90/traits.h"

namespace moe_fp8::sm90 {

constexpr int kPairRows = 256;

// The work units of a group with `rows` rows.
template <class T>
struct PairUnits {
  static constexpr bool kMulticastA = T::kTileM == kPairRows;
  int height, width;  // the grid of pairs
  int rest;           // pairs of the last rows, below the grid

  MOE_HD PairUnits(const typename T::Args& p, int rows) {
    if constexpr (kMulticastA) {
      height = ceil_div(rows, kPairRows);
      width = ceil_div(p.N, 2 * T::kTileN);
      rest = 0;
    } else {
      const int last_rows = rows % kPairRows;
      height = rows / kPairRows + (last_rows > T::kTileM);
      width = ceil_div(p.N, T::kTileN);
      rest = last_rows > 0 && last_rows <= T::kTileM ? ceil_div(width, 2) : 0;
    }
  }
  MOE_HD int count() const { return height * width + rest; }

  // The tile of block `rank` of the cluster.
  MOE_HD gemm::TileCoord tile(int unit, int rank) const {
    const int in_rest = unit - height * width;
    if (!kMulticastA && in_rest >= 0) return {2 * height, 2 * in_rest + rank, true};
    const gemm::TileCoord pair = gemm::rasterize(unit, height, width, kRasterRows);
    if (kMulticastA) return {pair.row, 2 * pair.column + rank, true};
    return {2 * pair.row + rank, pair.column};
  }
};

// A tile, and where it begins: its row in `out`, which stacks all groups, and in `b`, which stacks all experts.
struct Tile : gemm::Tile {
  int out_row, b_row;

  template <class T>
  static MOE_DEVICE Tile of(const typename T::Args& p, const gemm::Tile& tile) {
    return {tile, tile.a_row + (T::kKGrouped ? tile.expert * p.M : 0),
            tile.column + (T::kKGrouped ? 0 : tile.expert * p.b_expert_rows)};
  }
};

}  // namespace moe_fp8::sm90
