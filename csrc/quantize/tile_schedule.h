// The schedule of tiles of 128 rows by 128 columns, over tokens in groups or over experts.
#pragma once
#include "primitives/groups.h"
#include "quantize/policy.h"
#include "quantize/sources.h"

namespace moe_fp8 {

struct TilesPlan : QuantizeParams {
  uint32_t tiles_across;               // tiles along K
  int64_t stride, stride_t;            // between rows of row-major scales, or columns of column-major ones
  int64_t scales_t;                    // scales in a column of column-major scale_t, of tokens
  int64_t scale_bytes, scale_t_bytes;  // sizes of blocked scales, of tokens
  int blocks;                          // blocks of tokens that have scales, along the padded layout
  bool blocked;                        // whether E8M0 scales are blocked; otherwise they are row-major
  bool down_first;                     // rasterization: down the tokens first, then along K
};

struct QuantizedTile {
  bool valid = false;     // false: no tile is left
  int across = 0;         // number along K
  int64_t x = 0;          // the element of x from which its rows are counted
  int64_t first_row = 0;  // among all tokens, or among the rows of all experts
  int rows = 0;           // rows of x; the others are zeros
  int group_rows = 0;  // rows that q_t has: none in the tail
  int64_t q_t = 0;        // offset in q_t of its first row, in q_t's first column
  int expert = 0;
  int position = 0;       // of its first row, among all tokens or in the expert
  int positions = 0;      // positions of q_t that it writes, including padding
  int block = -1;         // number of its block of rows; -1: it has no scale
  int64_t scale = -1, scale_t = -1;  // numbers of its 128x4 blocks or squares along rows and columns; -1: none
};

// Places the scales of a tile: in either direction they are one block of the blocked layout, or the one scale of a
// square. The tile is number `along`, and its group or expert has `count` tiles from `first` on.
MOE_DEVICE void place_scales(QuantizedTile& tile, const TilesPlan& p, int64_t first, int64_t count, int along) {
  tile.scale = int64_t(along) * p.tiles_across + tile.across;
  tile.scale_t = first * p.tiles_across + tile.across * count + along - first;
}

MOE_DEVICE int clip_to_tile(int size) { return size < 0 ? 0 : size < kBlock ? size : kBlock; }

// The last group is the tail: rows without a group, positions and blocks without rows.
struct TokenTiles {
  static MOE_HD constexpr int words(int64_t E) { return 2 * GroupTable::words(int(E)) + 1; }
  MOE_DEVICE TokenTiles(int* storage, const TilesPlan& p)
      : p(p), E(int(p.E)), groups(storage, E), blocks(p.align < kBlock ? storage + GroupTable::words(E) : storage, E),
        num_tiles(storage + 2 * GroupTable::words(E)) {}

  const TilesPlan& p;
  int E;
  GroupTable groups;
  GroupTable blocks;  // the groups padded to whole scaling blocks; `groups` itself if align >= kBlock
  int* num_tiles;     // along the rows

  MOE_DEVICE void build() const {
    const int threads = blockDim.x * blockDim.y, t = threadIdx.y * blockDim.x + threadIdx.x;
    build_group_table(groups, p.offs, E, int(p.rows), int(p.positions), p.align);
    if (p.align < kBlock) build_group_table(blocks, p.offs, E, int(p.rows), p.blocks * kBlock, kBlock);
    if (blockIdx.x == 0)
      for (int e = t; e < E; e += threads) p.padded_offs[e] = groups.pos[e + 1];
    if (t != 0) return;
    const int first = group_tiles();  // of the tail
    const int row_tiles = first + (p.along_rows ? ceil_div(groups.rows(E), kBlock) : 0);
    const int position_tiles = first + ceil_div(int(p.positions) - groups.pos[E], kBlock);
    *num_tiles = Max{}(p.blocks, Max{}(row_tiles, position_tiles));
  }
  MOE_DEVICE int count() const { return *num_tiles; }
  MOE_DEVICE int first_tile_of(int e) const { return blocks.pos[e] / kBlock; }
  MOE_DEVICE int group_tiles() const { return first_tile_of(E); }
  MOE_DEVICE int group_of(int along) const { return GroupTable::find(blocks.pos, E, along * kBlock); }
  MOE_DEVICE QuantizedTile at(int along, int across) const { return at(along, across, group_of(along)); }
  MOE_DEVICE QuantizedTile at(int along, int across, int e) const {  // e: its group
    QuantizedTile tile;
    tile.across = across;
    const int skipped = along * kBlock - blocks.pos[e];
    tile.first_row = int64_t(groups.row[e]) + skipped;
    tile.x = p.index.at ? 0 : tile.first_row * p.row_stride;
    tile.rows = e < E || p.along_rows ? clip_to_tile(groups.rows(e) - skipped) : 0;
    tile.group_rows = e < E ? tile.rows : 0;
    tile.q_t = tile.position = groups.pos[e] + skipped;
    tile.positions = clip_to_tile(groups.pos[e + 1] - groups.pos[e] - skipped);
    tile.block = along < p.blocks ? along : -1;
    if (e < E) place_scales(tile, p, first_tile_of(e), first_tile_of(e + 1) - first_tile_of(e), along);
    return tile;
  }
};
struct ExpertTiles {
  static MOE_HD constexpr int words(int64_t) { return 0; }
  MOE_DEVICE ExpertTiles(int*, const TilesPlan& p) : p(p) {}

  const TilesPlan& p;

  MOE_DEVICE void build() const {}
  MOE_DEVICE int tiles_per_expert() const { return int(ceil_div<int64_t>(p.rows, kBlock)); }
  MOE_DEVICE int count() const { return int(p.E) * tiles_per_expert(); }
  MOE_DEVICE int group_tiles() const { return count(); }
  MOE_DEVICE QuantizedTile at(int along, int across) const {
    QuantizedTile tile;
    tile.across = across;
    tile.expert = along / tiles_per_expert();
    tile.position = along % tiles_per_expert() * kBlock;
    tile.first_row = tile.expert * p.rows + tile.position;
    tile.x = tile.expert * p.group_stride + tile.position * p.row_stride;
    tile.rows = tile.group_rows = tile.positions = clip_to_tile(int(p.rows) - tile.position);
    tile.q_t = tile.expert * p.rows * p.K + tile.position;
    tile.block = along;
    place_scales(tile, p, along - along % tiles_per_expert(), tiles_per_expert(), along);
    return tile;
  }
};

// The tile that a block takes in an iteration. Blocks take stacks of tiles, along K first. If an index repeats rows,
// stacks go down the tokens first, so that the L2 still holds a row when it is read again (docs/kernels/quantize.md).
// The last stack may reach beyond the last tile.
template <class Tiles>
MOE_DEVICE QuantizedTile tile_at_iteration(const TilesPlan& p, const Tiles& tiles, uint32_t iteration) {
  const uint32_t unit = blockIdx.x + iteration / kStack * gridDim.x;
  uint32_t stack = unit / p.tiles_across, across = unit % p.tiles_across;
  if (p.down_first) {
    const auto stacks = uint32_t(Max{}(ceil_div(tiles.count(), kStack), 1));
    stack = unit % stacks;
    across = unit / stacks;
  }
  const int first = int(stack) * kStack, along = first + int(iteration % kStack);
  QuantizedTile tile;
  if (along < tiles.count()) tile = tiles.at(along, int(across));
  tile.valid = first < tiles.count() && across < p.tiles_across;
  return tile;
}

}  // namespace moe_fp8
