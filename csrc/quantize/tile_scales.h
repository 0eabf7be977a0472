// The scales of a tile: how each kind of scales is stored.
#pragma once
#include "platform/memory.h"
#include "primitives/scale_sink.h"
#include "quantize/tile.h"

namespace moe_fp8 {

template <ScaleType>
struct TileScales;

// Blocks of 128: column-major scales. Squares of weights: row-major.
template <>
struct TileScales<ScaleType::kF32> {
  using Scale = ScaleF32;
  static constexpr int kSize = kBlock;

  // Clears the padding between the columns of `scale`.
  template <class T>
  static MOE_DEVICE void clear_gaps(const TilesPlan& p, const typename T::Tiles&) {
    if (T::kScaling != Scaling::kRowsAndColumns || blockIdx.x != 0 || p.K == 0) return;
    const uint32_t t = threadIdx.y * kLanes + threadIdx.x, gap = uint32_t(p.stride - p.rows);
    for (uint32_t i = t; i < p.tiles_across * gap; i += kTileThreads)
      static_cast<float*>(p.scale)[i / gap * p.stride + p.rows + i % gap] = 0.f;
  }

  // A thread stores one scale of a row and one of a column, so that whole lines are written.
  template <class T, class Shared>
  static MOE_DEVICE void store(const TilesPlan& p, const QuantizedTile& tile, const Shared& shared) {
    const int local = threadIdx.y * kLanes + threadIdx.x;
    if (local >= kBlock || p.K == 0) return;
    if constexpr (T::kScaling == Scaling::kSquares) {  // numbered in the order of memory
      const float scale = ScaleF32{shared.multiplier[0][0]}.stored();
      const ScaleSink<Scale, ScaleOrder::kRowMajor> sink(p.scale, 0), sink_t(p.scale_t, 0);
      if (local == 0 && tile.block >= 0 && writes_rows<T>(p)) store_stream(sink.at(0, tile.scale), scale);
      if (local == 1 && tile.block >= 0 && writes_columns<T>(p)) store_stream(sink_t.at(0, tile.scale_t), scale);
      return;
    }
    const ScaleSink<Scale, ScaleOrder::kColumnMajor> sink(p.scale, p.stride), sink_t(p.scale_t, p.stride_t);
    if (T::kScaling == Scaling::kRowsAndColumns && local < tile.rows)
      store_stream(sink.at(tile.first_row + local, tile.across), ScaleF32{shared.row_multiplier[local][0]}.stored());
    // One scale per column, or one for the tile. Behind the last column, threads write the padding.
    const int64_t first = int64_t(tile.across) * (p.has_square_amax() ? 1 : kBlock), at = first + local;
    const bool last = tile.across + 1 == int(p.tiles_across);
    if (tile.block < 0 || at >= (last || !p.has_square_amax() ? p.stride_t : first + 1)) return;
    const bool has_scale = at < p.scales_t && tile.group_rows > 0;
    store_stream(sink_t.at(at, tile.block), has_scale ? ScaleF32{shared.multiplier[0][local]}.stored() : 0.f);
  }
};

// Blocks of 32: row-major or blocked scales. Each half of the threads stores one direction.
template <>
struct TileScales<ScaleType::kE8M0> {
  using Scale = ScaleE8M0;
  static constexpr int kSize = kMxBlock;
  static_assert(kBlock == kScaleRows && kBlock == kScaleColumns * kMxBlock);  // the scales are one 128x4 block

  // Clears blocked scales behind the last group.
  template <class T>
  static MOE_DEVICE void clear_gaps(const TilesPlan& p, const typename T::Tiles& tiles) {
    if (!p.blocked) return;
    const int64_t used = int64_t(tiles.group_tiles()) * p.tiles_across * kScaleBytes;
    const int64_t t = int64_t(blockIdx.x) * kTileThreads + threadIdx.y * kLanes + threadIdx.x;
    const int64_t threads = int64_t(gridDim.x) * kTileThreads;
    if constexpr (T::kScaling != Scaling::kColumns)
      clear_scales(static_cast<uint8_t*>(p.scale), used, p.scale_bytes, t, threads);
    clear_scales(static_cast<uint8_t*>(p.scale_t), used, p.scale_t_bytes, t, threads);
  }

  template <class T, class Shared>
  static MOE_DEVICE void store(const TilesPlan& p, const QuantizedTile& tile, const Shared& shared) {
    const int t = threadIdx.y * kLanes + threadIdx.x;
    const int64_t column = int64_t(tile.across) * kBlock;
    if (p.K == 0) return;
    const int columns = int(p.K - column < kBlock ? p.K - column : kBlock);
    if (t < kBlock) {
      if (writes_rows<T>(p)) {
        const int blocks = ceil_div(columns, kMxBlock);
        const Matrix to = {p.scale, tile.scale, tile.first_row, tile.across * kScaleColumns,
                           p.stride, tile.rows, blocks, blocks};
        store_scales(p, to, t, [&](int row, int b) { return shared.row_multiplier[row][b]; });
      }
    } else if (writes_columns<T>(p)) {
      const Matrix to = {p.scale_t, tile.scale_t, tile.expert * p.K + column,
                         tile.position / kMxBlock, p.stride_t, columns, ceil_div(tile.positions, kMxBlock),
                         ceil_div(tile.group_rows, kMxBlock)};
      store_scales(p, to, t - kBlock, [&](int row, int b) { return shared.multiplier[b][row]; });
    }
  }

 private:
  using BlockedSink = ScaleSink<Scale, ScaleOrder::kBlocked>;
  using RowMajorSink = ScaleSink<Scale, ScaleOrder::kRowMajor>;

  // The place of the scales of one direction: a 128x4 block, or a row and a column where they begin.
  struct Matrix {
    void* scale;
    int64_t block, row, column, stride;
    int rows, columns;  // the tile's rows and columns of the row-major matrix
    int used;           // columns that have a scale; the others are zero
  };

  // Called by 128 threads. Each stores the four scales of one row of the tile: word t of the 128x4 block, or row t.
  template <class Multiplier>
  static MOE_DEVICE void store_scales(const TilesPlan& p, const Matrix& to, int t, Multiplier multiplier) {
    const int row = p.blocked ? BlockedSink::row_of_word(t) : t;
    uint32_t bytes = 0;
#pragma unroll
    for (int b = 0; b < kScaleColumns; ++b)
      if (row < to.rows && b < to.used) bytes |= uint32_t(ScaleE8M0{multiplier(row, b)}.stored()) << (8 * b);
    if (p.blocked) {
      if (to.block >= 0) BlockedSink(to.scale, 0).store_word(to.block, t, bytes);
    } else if (row < to.rows) {
      RowMajorSink(to.scale, to.stride).store_four(to.row + row, to.column, to.columns, bytes);
    }
  }
};

}  // namespace moe_fp8
