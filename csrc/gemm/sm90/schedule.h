// How the tiles of a grouped product are dealt out, from offsets that only the device knows.
//
// A cluster of two blocks works on a unit: a pair of tiles of one group, one below the other, which read the same rows
// of B, so that each block loads half of them for both. Where the last rows of a group are a tile without a second one
// below, the pair is two tiles beside one another, which share the rows of A likewise. A pair never straddles groups.
//
//            columns ->                          Units go down a band of kBand pairs, then to the next columns: what
//   pair 0   [unit 0][unit 3]                    clusters read at about the same time lies in the L2. Clusters take
//   pair 1   [unit 1][unit 4]                    the units first, first + clusters, ... : no tile waits for another,
//   pair 2   [unit 2][unit 5]                    and equal offsets give equal sums, block for block.
//   last     [    unit 6    ]
#pragma once
#include "numerics/groups.h"
#include "primitives/group_table.h"

namespace moe_fp8::sm90 {

// What groups divide: the rows of a and out (2D x 3D), or the sum, with an out for every group (2D x 2D).
enum class Grouped { kRows, kSum };

constexpr int kTileRows = 128, kTileColumns = 256, kPairRows = 2 * kTileRows;
constexpr int kDepth = 128;     // elements of the sum in a stage, and under one scale of a block
constexpr int kSumAlign = 32;   // groups of the sum: one instruction's worth, so that none holds two groups
constexpr int kBand = 8;        // pairs; 8 to 16 of them are equal within the noise on an H200

// Of a group of so many rows, by `strips` of kTileColumns columns.
MOE_HD int units_of(int rows, int strips) {
  const int pairs = rows / kPairRows, rest = rows % kPairRows;
  return (pairs + (rest > kTileRows)) * strips + (rest > 0 && rest <= kTileRows ? ceil_div(strips, 2) : 0);
}

// This block's tile of a unit.
struct Tile {
  bool there = false;           // otherwise none is left
  bool beside = false;          // the pair shares rows of A, otherwise of B
  int expert = 0;
  int row = 0, rows = 0;        // of out: the first, and how many are the group's, up to kTileRows
  int column = 0, columns = 0;  // likewise, but all that is left of N; none of it: not positive
  int row_of_a = 0, row_of_b = 0;
  int first = 0, depth = 0;     // elements of the sum
};

// In shared memory.
struct GroupBounds {
  int end[kMaxExperts + 1];     // group e has [end[e], end[e + 1]) of what is grouped
  int units[kMaxExperts + 1];   // kRows: before it; of kSum all groups have equally many

  // By the whole block; ends with a barrier. offs may hold anything.
  template <Grouped kGrouped>
  MOE_DEVICE void build(const int* offs, int E, int extent, int strips) {
    const int threads = blockDim.x, t = threadIdx.x;
    if (t == 0) end[0] = units[0] = 0;
    for (int e = t; e < E; e += threads) {
      const int at = clamp_offset(offs[e], extent);
      end[e + 1] = kGrouped == Grouped::kSum ? at / kSumAlign * kSumAlign : at;
    }
    __syncthreads();
    block_scan(end + 1, E, Max{});
    for (int e = t; e < E; e += threads) units[e + 1] = units_of(end[e + 1] - end[e], strips);
    __syncthreads();
    block_scan(units + 1, E, Sum{});
  }
};

template <Grouped kGrouped>
class Schedule {
 public:
  // M: rows of a; rank: of the block in its cluster.
  MOE_DEVICE Schedule(const GroupBounds& groups, int E, int M, int N, int K, int rank)
      : groups_(groups), E_(E), M_(M), N_(N), K_(K), strips_(ceil_div(N, kTileColumns)), rank_(rank),
        unit_(int(blockIdx.x) / 2), units_(kGrouped == Grouped::kSum ? E * units_of(M, strips_) : groups.units[E]) {}

  MOE_DEVICE Tile next() {
    Tile tile;
    if (unit_ >= units_) return tile;
    const int in_group = find_expert(), first = groups_.end[expert_], size = groups_.end[expert_ + 1] - first;
    const int rows = kGrouped == Grouped::kSum ? M_ : size;
    const Place at = place(in_group, rows);
    const int skipped = at.tile_row * kTileRows, left = rows - skipped;
    tile.there = true;
    tile.beside = at.beside;
    tile.expert = expert_;
    tile.rows = left < kTileRows ? left : kTileRows;
    tile.column = at.strip * kTileColumns;
    tile.columns = N_ - tile.column;
    if constexpr (kGrouped == Grouped::kSum) {
      tile.row = expert_ * M_ + skipped;
      tile.row_of_a = skipped;
      tile.row_of_b = tile.column;
      tile.first = first;
      tile.depth = size;
    } else {
      tile.row = tile.row_of_a = first + skipped;
      tile.row_of_b = expert_ * N_ + tile.column;
      tile.depth = K_;
    }
    unit_ += int(gridDim.x) / 2;
    return tile;
  }

 private:
  struct Place {
    int tile_row, strip;
    bool beside;
  };
  // Of a unit of a group of so many rows.
  MOE_DEVICE Place place(int unit, int rows) const {
    const int pairs = rows / kPairRows + (rows % kPairRows > kTileRows), beside = unit - pairs * strips_;
    if (beside >= 0) return {2 * pairs, 2 * beside + rank_, true};
    const int band = unit / (kBand * strips_), begin = band * kBand, in_band = unit - begin * strips_;
    const int height = pairs - begin < kBand ? pairs - begin : kBand;
    return {2 * (begin + in_band % height) + rank_, in_band / height, false};
  }
  // Moves on to the expert of the next unit; returns the unit's number among the expert's.
  MOE_DEVICE int find_expert() {
    if constexpr (kGrouped == Grouped::kSum) {
      const int of_expert = units_ / E_;
      expert_ = unit_ / of_expert;
      return unit_ - expert_ * of_expert;
    } else {
      while (unit_ >= groups_.units[expert_ + 1]) ++expert_;
      return unit_ - groups_.units[expert_];
    }
  }

  const GroupBounds& groups_;
  int E_, M_, N_, K_, strips_, rank_, unit_, units_, expert_ = 0;
};

}  // namespace moe_fp8::sm90
