// How tokens in groups, and experts, are dealt out in tiles of 128 rows by 128 columns.
#pragma once
#include "primitives/groups.h"
#include "quantize/sources.h"

namespace moe_fp8 {

struct TilesPlan : QuantizeParams {
  uint32_t tiles_across;               // along K
  int64_t stride, stride_t;            // of scales that are not blocked: between rows, or column-major columns
  int64_t scales_t;                    // of tokens, column-major: in a column
  int64_t scale_bytes, scale_t_bytes;  // of blocked scales, of tokens
  int blocks;                          // along the padded layout, of tokens: those that have scales of their own
  bool blocked;                        // scales of 32, of either direction; else row-major
  bool down_first;                     // all tiles that lie below one another before those beside them
};

constexpr int kStack = 2;  // tiles, one below the other, whose columns are stored together

struct QuantizedTile {
  bool there = false;     // otherwise none is left
  int across = 0;         // which along K
  int64_t x = 0;          // element of x that its rows are counted from
  int64_t first_row = 0;  // of the tokens, or of all experts' rows
  int rows = 0;           // that there are; those beyond them are zeros
  int rows_of_group = 0;  // none in the tail: nothing of it is in q_t
  int64_t q_t = 0;        // of its first row: element of q_t's first column
  int expert = 0;
  int position = 0;       // of its first row: of all tokens, or of the expert
  int positions = 0;      // of q_t that it writes, padding included
  int block = -1;         // along the rows; -1: has no scale
  int64_t scale = -1, scale_t = -1;  // which of the scales of whole tiles: of its rows and of its columns; -1: has none
};

// The scales of a tile in either direction are a block of the blocked layout, or the one scale of a square: of tile
// `along` of the `count` that a group or an expert has from `first` on.
MOE_DEVICE void place_scales(QuantizedTile& tile, const TilesPlan& p, int64_t first, int64_t count, int along) {
  tile.scale = int64_t(along) * p.tiles_across + tile.across;
  tile.scale_t = first * p.tiles_across + tile.across * count + along - first;
}

MOE_DEVICE int part_of_tile(int size) { return size < 0 ? 0 : size < kBlock ? size : kBlock; }

// The last group is the tail: rows without a group, positions and blocks without rows.
struct TokenTiles {
  static MOE_HD constexpr int words(int64_t E) { return 2 * GroupTable::words(int(E)) + 1; }
  MOE_DEVICE TokenTiles(int* storage, const TilesPlan& p)
      : p(p), E(int(p.E)), groups(storage, E), blocks(p.align < kBlock ? storage + GroupTable::words(E) : storage, E),
        tiles(storage + 2 * GroupTable::words(E)) {}

  const TilesPlan& p;
  int E;
  GroupTable groups;
  GroupTable blocks;  // likewise, padded to whole scaling blocks
  int* tiles;         // how many there are along the rows

  MOE_DEVICE void build() const {
    const int threads = blockDim.x * blockDim.y, t = threadIdx.y * blockDim.x + threadIdx.x;
    build_group_table(groups, p.offs, E, int(p.rows), int(p.positions), p.align);
    if (p.align < kBlock) build_group_table(blocks, p.offs, E, int(p.rows), p.blocks * kBlock, kBlock);
    if (blockIdx.x == 0)
      for (int e = t; e < E; e += threads) p.padded_offs[e] = groups.pos[e + 1];
    if (t != 0) return;
    const int first = of_groups();  // of the tail
    const int of_rows = first + (p.along_rows ? ceil_div(groups.rows(E), kBlock) : 0);
    const int of_positions = first + ceil_div(int(p.positions) - groups.pos[E], kBlock);
    *tiles = Max{}(p.blocks, Max{}(of_rows, of_positions));
  }
  MOE_DEVICE int count() const { return *tiles; }
  MOE_DEVICE int first_of(int e) const { return blocks.pos[e] / kBlock; }  // of the tiles of a group
  MOE_DEVICE int of_groups() const { return first_of(E); }
  MOE_DEVICE int group_of(int along) const { return GroupTable::find(blocks.pos, E, along * kBlock); }
  MOE_DEVICE QuantizedTile at(int along, int across) const { return at(along, across, group_of(along)); }
  MOE_DEVICE QuantizedTile at(int along, int across, int e) const {  // e: its group
    QuantizedTile tile;
    tile.across = across;
    const int skipped = along * kBlock - blocks.pos[e];
    tile.first_row = int64_t(groups.row[e]) + skipped;
    tile.x = p.index.at ? 0 : tile.first_row * p.row_stride;
    tile.rows = e < E || p.along_rows ? part_of_tile(groups.rows(e) - skipped) : 0;
    tile.rows_of_group = e < E ? tile.rows : 0;
    tile.q_t = tile.position = groups.pos[e] + skipped;
    tile.positions = part_of_tile(groups.pos[e + 1] - groups.pos[e] - skipped);
    tile.block = along < p.blocks ? along : -1;
    if (e < E) place_scales(tile, p, first_of(e), first_of(e + 1) - first_of(e), along);
    return tile;
  }
};
struct ExpertTiles {
  static MOE_HD constexpr int words(int64_t) { return 0; }
  MOE_DEVICE ExpertTiles(int*, const TilesPlan& p) : p(p) {}

  const TilesPlan& p;

  MOE_DEVICE void build() const {}
  MOE_DEVICE int of_expert() const { return int(ceil_div<int64_t>(p.rows, kBlock)); }
  MOE_DEVICE int count() const { return int(p.E) * of_expert(); }
  MOE_DEVICE int of_groups() const { return count(); }
  MOE_DEVICE QuantizedTile at(int along, int across) const {
    QuantizedTile tile;
    tile.across = across;
    tile.expert = along / of_expert();
    tile.position = along % of_expert() * kBlock;
    tile.first_row = tile.expert * p.rows + tile.position;
    tile.x = tile.expert * p.group_stride + tile.position * p.row_stride;
    tile.rows = tile.rows_of_group = tile.positions = part_of_tile(int(p.rows) - tile.position);
    tile.q_t = tile.expert * p.rows * p.K + tile.position;
    tile.block = along;
    place_scales(tile, p, along - along % of_expert(), of_expert(), along);
    return tile;
  }
};

// The tile of a block's turn: stacks of tiles are dealt out to the blocks, those beside one another first. Where an
// index takes rows several times, those below one another come first, so that the L2 holds what is read at about the
// same time: on an H200, columns of [32768, 4096], 8 slots a row, took 840 us, not 996; but rows that are taken once,
// along both dimensions, 2 to 12% longer. The last stack may reach beyond the last tile.
template <class Tiles>
MOE_DEVICE QuantizedTile tile_of_turn(const TilesPlan& p, const Tiles& tiles, uint32_t turn) {
  const uint32_t unit = blockIdx.x + turn / kStack * gridDim.x;
  uint32_t stack = unit / p.tiles_across, across = unit % p.tiles_across;
  if (p.down_first) {
    const auto stacks = uint32_t(Max{}(ceil_div(tiles.count(), kStack), 1));
    stack = unit % stacks;
    across = unit / stacks;
  }
  const int first = int(stack) * kStack, along = first + int(turn % kStack);
  QuantizedTile tile;
  if (along < tiles.count()) tile = tiles.at(along, int(across));
  tile.there = first < tiles.count() && across < p.tiles_across;
  return tile;
}

}  // namespace moe_fp8
