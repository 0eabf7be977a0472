// How the tiles of a grouped product are dealt out, from offsets that only the device knows.
//
// A cluster of two blocks works on a unit: a pair of tiles of one group, 256 rows and as many columns or fewer, that
// read the same rows of one operand; each block copies half of those for both. A pair never straddles groups.
//
//            columns ->                          Units go down a band of kBand pairs, then to the next columns: what
//   pair 0   [unit 0][unit 3]                    clusters read at about the same time lies in the L2. Every cluster
//   pair 1   [unit 1][unit 4]                    takes one unit of a round, forwards in one and backwards in the next,
//   pair 2   [unit 2][unit 5]                    so that no tile waits for another.
//
// Groups of the sum come by size, for the size is what their units cost: rounds of like units end together.
//
// Tiles of 128 rows lie one below the other and share rows of B; where the last rows of a group are one such tile, the
// pair is two of them beside one another, twice as many columns, and shares the rows of A. Tiles of 256 rows always lie
// beside one another.
#pragma once
#include "gemm/sm90/args.h"
#include "primitives/group_table.h"

namespace moe_fp8::sm90 {

constexpr int kPairRows = 256;
constexpr int kSumAlign = 32;  // groups of the sum: one instruction's worth, so that none holds two groups
constexpr int kBand = 8;       // pairs; 8 to 16 of them are equal within the noise on an H200

// The units of a group of so many rows.
template <class T>
struct Units {
  int pairs, rest;  // rows of units, and units of the last rows behind them
  int across;       // units in a row

  MOE_HD Units(int rows, int N) {
    if constexpr (T::kTileRows == kPairRows) {
      pairs = ceil_div(rows, kPairRows);
      across = ceil_div(N, 2 * T::kTileColumns);
      rest = 0;
    } else {
      const int left = rows % kPairRows;
      pairs = rows / kPairRows + (left > T::kTileRows);
      across = ceil_div(N, T::kTileColumns);
      rest = left > 0 && left <= T::kTileRows ? ceil_div(across, 2) : 0;
    }
  }
  MOE_HD int count() const { return pairs * across + rest; }
};

// This block's tile of a unit.
struct Tile {
  bool there = false;           // otherwise none is left
  bool beside = false;          // the pair shares rows of A, otherwise of B
  int expert = 0;
  int row = 0, rows = 0;        // of out: the first, and how many are the group's, up to a tile's
  int column = 0, columns = 0;  // likewise, but all that is left of N; none of it: not positive
  int row_of_a = 0, row_of_b = 0;
  int first = 0, depth = 0;     // elements of the sum
  int first_block = 0;          // of scales along the sum
};

// In shared memory.
struct GroupBounds {
  int end[kMaxExperts + 1];     // group e has [end[e], end[e + 1]) of what is grouped
  int before[kMaxExperts + 1];  // group e: units, of kRows; blocks of scales, of kSum
  uint16_t by_size[kMaxExperts];  // of kSum: the groups, largest first

  // By the whole block; ends with a barrier. offs may hold anything.
  template <class T>
  MOE_DEVICE void build(const int* offs, int E, int extent, int N) {
    const int threads = blockDim.x, t = threadIdx.x;
    if (t == 0) end[0] = before[0] = 0;
    for (int e = t; e < E; e += threads) {
      const int at = clamp_offset(offs[e], extent);
      end[e + 1] = T::kSumGroups ? at / kSumAlign * kSumAlign : at;
    }
    __syncthreads();
    block_scan(end + 1, E, Max{});
    for (int e = t; e < E; e += threads) {
      const int size = end[e + 1] - end[e];
      before[e + 1] = T::kSumGroups ? ceil_div(size, kDepth) : Units<T>(size, N).count();
      if (!T::kSumGroups) continue;
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
  // rank: of the block in its cluster.
  MOE_DEVICE Schedule(const Args& p, const GroupBounds& groups, int rank) : p_(p), groups_(groups), rank_(rank) {}

  MOE_DEVICE Tile next() {
    Tile tile;
    const int clusters = int(gridDim.x) / 2, cluster = int(blockIdx.x) / 2;
    const int unit = round_ * clusters + (round_ % 2 ? clusters - 1 - cluster : cluster);
    if (unit >= (T::kSumGroups ? p_.E * of_group() : groups_.before[p_.E])) return tile;
    ++round_;
    const int in_group = find_expert(unit), first = groups_.end[expert_], size = groups_.end[expert_ + 1] - first;
    const int rows = T::kSumGroups ? p_.M : size;
    const Place at = place(in_group, rows);
    const int skipped = at.row * T::kTileRows, left = rows - skipped;
    tile.there = true;
    tile.beside = at.beside;
    tile.expert = expert_;
    tile.rows = left < T::kTileRows ? left : T::kTileRows;
    tile.column = at.column * T::kTileColumns;
    tile.columns = p_.N - tile.column;
    if constexpr (T::kSumGroups) {
      tile.row = expert_ * p_.M + skipped;
      tile.row_of_a = skipped;
      tile.row_of_b = tile.column;
      tile.first = first;
      tile.depth = size;
      tile.first_block = groups_.before[expert_];
    } else {
      tile.row = tile.row_of_a = first + skipped;
      tile.row_of_b = expert_ * p_.N + tile.column;
      tile.depth = p_.K;
    }
    return tile;
  }

 private:
  struct Place {
    int row, column;  // in tiles
    bool beside;
  };
  // Of a unit of a group of so many rows.
  MOE_DEVICE Place place(int unit, int rows) const {
    constexpr bool kBeside = T::kTileRows == kPairRows;
    const Units<T> units(rows, p_.N);
    const int in_rest = unit - units.pairs * units.across;
    if (!kBeside && in_rest >= 0) return {2 * units.pairs, 2 * in_rest + rank_, true};
    const int band = unit / (kBand * units.across), begin = band * kBand, in_band = unit - begin * units.across;
    const int height = units.pairs - begin < kBand ? units.pairs - begin : kBand;
    const int pair = begin + in_band % height, column = in_band / height;
    if (kBeside) return {pair, 2 * column + rank_, true};
    return {2 * pair + rank_, column, false};
  }
  // Moves on to the expert of a unit; returns the unit's number among the expert's.
  MOE_DEVICE int find_expert(int unit) {
    if constexpr (T::kSumGroups) {
      const int at = unit / of_group();
      expert_ = groups_.by_size[at];
      return unit - at * of_group();
    } else {
      while (unit >= groups_.before[expert_ + 1]) ++expert_;
      return unit - groups_.before[expert_];
    }
  }

  MOE_DEVICE int of_group() const { return Units<T>(p_.M, p_.N).count(); }  // of kSum

  const Args& p_;
  const GroupBounds& groups_;
  int rank_, round_ = 0, expert_ = 0;
};

}  // namespace moe_fp8::sm90
