// Tile scheduling of grouped products, whose group offsets only the device knows.
//
// A worker, a block or a cluster of blocks, takes one work unit at a time: a tile, or neighbouring tiles of one group
// that share operands. T::Scheduler decides which unit is next; TileScheduler turns it into a tile.
//
// The traits T of a kernel provide:
//   Args                  the launch arguments of the kernel: M, N, K, E
//   k_grouped(args)       whether groups divide K (2D x 2D), not M (2D x 3D)
//   kOffsAlign            groups along K begin at multiples of this
//   kTileM, kTileN        rows and columns of a tile
//   Units(args, rows)     the work units of a group with `rows` rows of out: count(), and tile(unit, rank)
//   Scheduler             StaticScheduler, DynamicScheduler or LongestFirstScheduler
#pragma once
#include "gemm/schedule/longest_first.h"

namespace moe_fp8::gemm {

// Position of a tile in its group, in tiles.
struct TileCoord {
  int row, column;
  bool multicast_a = false;
};
struct Tile {
  bool valid = false;           // false: no tile is left
  bool multicast_a = false;     // the unit's tiles are neighbours along N and share rows of a; false: they share b
  int expert = 0;
  int a_row = 0, rows = 0;      // first row of a; rows of the group from there on, up to kTileM
  int column = 0, columns = 0;  // first column of out; columns from there to N, possibly more than kTileN or below 1
  int k_begin = 0, k_size = 0;  // range along K
  int first_scale_block = 0;    // K-grouped: the group's first block of kGroupScales elements
};

// counter: constructor argument of a DynamicScheduler.
template <class T, class Scheduler = typename T::Scheduler>
class TileScheduler {
 public:
  using Args = typename T::Args;

  template <class... Counter>
  MOE_DEVICE TileScheduler(const Args& p, const GroupOffsets& groups, int worker, int workers,
                           const Counter&... counter)
      : p_(p), groups_(groups), scheduler_(p, groups, worker, workers, counter...) {}

  // Returns tile `rank` of the worker's next unit.
  MOE_DEVICE Tile next(int rank) {
    Tile tile;
    const WorkUnit unit = scheduler_.next();
    if (unit.expert < 0) return tile;
    const int begin = groups_.offsets[unit.expert], size = groups_.offsets[unit.expert + 1] - begin;
    const int rows = T::k_grouped(p_) ? p_.M : size;
    const TileCoord coord = typename T::Units(p_, rows).tile(unit.index, rank);
    const int row = coord.row * T::kTileM, rows_left = rows - row;
    tile.valid = true;
    tile.multicast_a = coord.multicast_a;
    tile.expert = unit.expert;
    tile.rows = rows_left < T::kTileM ? rows_left : T::kTileM;
    tile.column = coord.column * T::kTileN;
    tile.columns = p_.N - tile.column;
    if (T::k_grouped(p_)) {
      tile.a_row = row;
      tile.k_begin = begin;
      tile.k_size = size;
      tile.first_scale_block = groups_.scale_blocks_before(unit.expert);
    } else {
      tile.a_row = begin + row;
      tile.k_size = p_.K;
    }
    return tile;
  }

 private:
  const Args& p_;
  const GroupOffsets& groups_;
  Scheduler scheduler_;
};

// Threadblock rasterization for L2 reuse: units go down the columns of max_rows rows, then through the next max_rows
// rows. `height` and `width` are the grid of units.
MOE_HD TileCoord rasterize(int unit, int height, int width, int max_rows) {
  const int first_row = unit / (max_rows * width) * max_rows, place = unit - first_row * width;
  const int rows = height - first_row < max_rows ? height - first_row : max_rows;
  return {first_row + place % rows, place / rows};
}

}  // namespace moe_fp8::gemm
