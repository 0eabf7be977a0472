// How the tiles of a grouped product are dealt out, from offsets that only the device knows.
//
// A worker, a block or a cluster of blocks, takes units of work: each is of one group, a tile or some that share what
// they read.
//
// The traits T of a kernel say what a unit is:
//   Args                       what it was launched with: M, N, K, E
//   of_sum(args)               whether groups divide the sum
//   kSumAlign                  multiples of what such groups begin at
//   kTileRows, kTileColumns
//   Units(args, rows)          of a group of so many rows: count() of them, and the place(unit, rank) of their tiles
//   Deal                       of deal.h: who takes which
#pragma once
#include "gemm/schedule/tile_scheduler.h"

namespace moe_fp8::gemm {

// Of a tile, in tiles.
struct Place {
  int row, column;
  bool beside = false;  // whether the tiles of the unit lie beside one another, and share rows of A, otherwise of B
};
struct Tile {
  bool there = false;           // otherwise none is left
  bool beside = false;
  int expert = 0;
  int row_of_a = 0, rows = 0;   // the first, and how many are the group's, up to a tile's
  int column = 0, columns = 0;  // likewise, but all that is left of N; none of it: not positive
  int first = 0, depth = 0;     // elements of the sum
  int first_block = 0;          // of kGroupScales along the sum, in which those of a group begin
};

// Counter: of a Deal that draws numbers, where they come from.
template <class T, class Deal = typename T::Deal>
class Schedule {
 public:
  using Args = typename T::Args;

  template <class... Counter>
  MOE_DEVICE Schedule(const Args& p, const GroupBounds& groups, int worker, int workers, const Counter&... counter)
      : p_(p), groups_(groups), deal_(p, groups, worker, workers, counter...) {}

  // rank: of the tile in its unit.
  MOE_DEVICE Tile next(int rank) {
    Tile tile;
    const Unit unit = deal_.next();
    if (unit.expert < 0) return tile;
    const int first = groups_.end[unit.expert], size = groups_.end[unit.expert + 1] - first;
    const int rows = T::of_sum(p_) ? p_.M : size;
    const Place at = typename T::Units(p_, rows).place(unit.number, rank);
    const int skipped = at.row * T::kTileRows, left = rows - skipped;
    tile.there = true;
    tile.beside = at.beside;
    tile.expert = unit.expert;
    tile.rows = left < T::kTileRows ? left : T::kTileRows;
    tile.column = at.column * T::kTileColumns;
    tile.columns = p_.N - tile.column;
    if (T::of_sum(p_)) {
      tile.row_of_a = skipped;
      tile.first = first;
      tile.depth = size;
      tile.first_block = groups_.before[unit.expert];
    } else {
      tile.row_of_a = first + skipped;
      tile.depth = p_.K;
    }
    return tile;
  }

 private:
  const Args& p_;
  const GroupBounds& groups_;
  Deal deal_;
};

// The place of a unit among rows of units, `across` in each: units go down a band of them, then to the next columns, so
// that what workers read at about the same time lies in the L2.
MOE_HD Place in_bands(int unit, int height, int across, int of_band) {
  const int band = unit / (of_band * across), begin = band * of_band, in_band = unit - begin * across;
  const int high = height - begin < of_band ? height - begin : of_band;
  return {begin + in_band % high, in_band / high};
}

}  // namespace moe_fp8::gemm
