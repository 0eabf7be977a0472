// How the tiles of a grouped product are dealt out, from offsets that only the device knows.
//
// A worker, a block or a cluster of blocks, takes units of work: each is of one group, a tile or some that share what
// they read. Every worker takes one unit of a round, forwards in one and backwards in the next, so that no tile waits
// for another. Groups of the sum come by size, for that is what their units cost: rounds of like units end together.
//
// The traits T of a kernel say what a unit is:
//   Args                       what it was launched with: M, N, K, E
//   of_sum(args)               whether groups divide the sum
//   kSumAlign                  multiples of what such groups begin at
//   kTileRows, kTileColumns
//   Units(args, rows)          of a group of so many rows: count() of them, and the place(unit, rank) of their tiles
#pragma once
#include "numerics/groups.h"
#include "numerics/operand_scales.h"
#include "primitives/group_table.h"

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

// In shared memory.
struct GroupBounds {
  int end[kMaxExperts + 1];     // group e has [end[e], end[e + 1]) of what is grouped
  int before[kMaxExperts + 1];  // group e: units, of groups of rows; blocks of kGroupScales, of those of the sum
  uint16_t by_size[kMaxExperts];  // of the sum: the groups, largest first

  // By the whole block; ends with a barrier. offs may hold anything.
  template <class T>
  MOE_DEVICE void build(const int* offs, const typename T::Args& p) {
    const int threads = blockDim.x, t = threadIdx.x, E = p.E, extent = T::of_sum(p) ? p.K : p.M;
    if (t == 0) end[0] = before[0] = 0;
    for (int e = t; e < E; e += threads) {
      const int at = clamp_offset(offs[e], extent);
      end[e + 1] = T::of_sum(p) ? at / T::kSumAlign * T::kSumAlign : at;
    }
    __syncthreads();
    block_scan(end + 1, E, Max{});
    for (int e = t; e < E; e += threads) {
      const int size = end[e + 1] - end[e];
      before[e + 1] = T::of_sum(p) ? ceil_div(size, kGroupScales) : typename T::Units(p, size).count();
      if (!T::of_sum(p)) continue;
      int larger = 0;
      for (int other = 0; other < E; ++other) {
        const int of_other = end[other + 1] - end[other];
        larger += of_other > size || (of_other == size && other < e);
      }
      by_size[larger] = uint16_t(e);
    }
    __syncthreads();
    block_scan(before + 1, E, Sum{});
  }
};

template <class T>
class Schedule {
 public:
  using Args = typename T::Args;

  MOE_DEVICE Schedule(const Args& p, const GroupBounds& groups, int worker, int workers)
      : p_(p), groups_(groups), worker_(worker), workers_(workers) {}

  // rank: of the tile in its unit.
  MOE_DEVICE Tile next(int rank) {
    Tile tile;
    const int unit = round_ * workers_ + (round_ % 2 ? workers_ - 1 - worker_ : worker_);
    if (unit >= (T::of_sum(p_) ? p_.E * of_group() : groups_.before[p_.E])) return tile;
    ++round_;
    const int in_group = find_expert(unit), first = groups_.end[expert_], size = groups_.end[expert_ + 1] - first;
    const int rows = T::of_sum(p_) ? p_.M : size;
    const Place at = typename T::Units(p_, rows).place(in_group, rank);
    const int skipped = at.row * T::kTileRows, left = rows - skipped;
    tile.there = true;
    tile.beside = at.beside;
    tile.expert = expert_;
    tile.rows = left < T::kTileRows ? left : T::kTileRows;
    tile.column = at.column * T::kTileColumns;
    tile.columns = p_.N - tile.column;
    if (T::of_sum(p_)) {
      tile.row_of_a = skipped;
      tile.first = first;
      tile.depth = size;
      tile.first_block = groups_.before[expert_];
    } else {
      tile.row_of_a = first + skipped;
      tile.depth = p_.K;
    }
    return tile;
  }

 private:
  // Moves on to the expert of a unit; returns the unit's number among the expert's.
  MOE_DEVICE int find_expert(int unit) {
    if (T::of_sum(p_)) {
      const int at = unit / of_group();
      expert_ = groups_.by_size[at];
      return unit - at * of_group();
    }
    while (unit >= groups_.before[expert_ + 1]) ++expert_;
    return unit - groups_.before[expert_];
  }
  MOE_DEVICE int of_group() const { return typename T::Units(p_, p_.M).count(); }  // of the sum

  const Args& p_;
  const GroupBounds& groups_;
  int worker_, workers_, round_ = 0, expert_ = 0;
};

// The place of a unit among rows of units, `across` in each: units go down a band of them, then to the next columns, so
// that what workers read at about the same time lies in the L2.
MOE_HD Place in_bands(int unit, int height, int across, int of_band) {
  const int band = unit / (of_band * across), begin = band * of_band, in_band = unit - begin * across;
  const int high = height - begin < of_band ? height - begin : of_band;
  return {begin + in_band % high, in_band / high};
}

}  // namespace moe_fp8::gemm
