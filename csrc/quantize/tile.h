// A tile of 128 rows by 128 columns. It holds whole scaling blocks along rows, along columns or both, so that one read
// of x serves every direction. If the chip has asynchronous copies and enough shared memory, the next tile arrives in
// shared memory while the current one, in registers, is cast and stored.
//
//              lane 0   lane 1   ...  lane 31           a lane has four neighbouring columns of 16 rows in registers
//   row of     cols     cols          cols
//   threads    0..3     4..7          124..127          along rows:  blocks of 32 or 128 columns are 8 or 32 lanes
//     0        rows   0..15                             along columns: blocks of 32 or 128 rows are 2 or 8 rows of
//     1        rows  16..31                             threads; their maxima meet in shared.thread_row_amax
//    ...
//     7        rows 112..127
#pragma once
#include "platform/launch.h"
#include "platform/memory.h"
#include "platform/waves.h"
#include "primitives/row_reduce.h"
#include "primitives/transpose.h"
#include "quantize/tile_schedule.h"

namespace moe_fp8 {

enum class Scaling { kColumns, kRowsAndColumns, kSquares };

template <class Types_, class Format_, Scaling kScaling_, class Tiles_>
struct TileTraits {
  using Types = Types_;    // Vectorized or Generic
  using Format = Format_;  // how scales are stored: tile_scales.h
  using Scale = typename Format::Scale;
  using In = typename Types::In;
  using Tiles = Tiles_;
  static constexpr Scaling kScaling = kScaling_;
  static constexpr int kColumns = kBlock / kLanes;       // columns of a lane
  static constexpr int kWords = kColumns / kPerWord<In>;
  static constexpr int kBlocks = kBlock / Format::kSize;  // scaling blocks of a tile along either dimension
  static constexpr int kLanesPerBlock = kLanes / kBlocks;  // lanes that share a scaling block of a row
  static constexpr int kChunks = kBlock / Types::kVec;    // 16 bytes of a row
};
constexpr int kTileThreadRows = kBlock / kChunkRows, kTileThreads = kTileThreadRows * kLanes;

// The directions that a kernel writes. Only weights leave the choice to the parameters.
template <class T>
constexpr bool kIsWeight = std::is_same_v<typename T::Tiles, ExpertTiles>;
template <class T>
MOE_DEVICE bool writes_rows(const TilesPlan& p) {
  return T::kScaling != Scaling::kColumns && (!kIsWeight<T> || p.along_rows);
}
template <class T>
MOE_DEVICE bool writes_columns(const TilesPlan& p) {
  return !kIsWeight<T> || p.along_tokens;
}

template <class T>
using TileWords = uint32_t[kChunkRows][T::kWords];
template <class T>
using TileStage = TransposeStage<kBlock, T::kColumns>;

// The end of the tile's first `rows` rows, counted from the first row of this row of threads. If it is not positive,
// this row of threads has no such row.
MOE_DEVICE int in_thread_row(int rows) { return rows - int(threadIdx.y) * kChunkRows; }
// The same, counted from the first row of this wave: the rows of threads of a wave shuffle together.
MOE_DEVICE int in_wave(int rows) {
  constexpr int kThreadRowsOfWave = kWarpSize / kLanes;
  return rows - int(threadIdx.y) / kThreadRowsOfWave * kThreadRowsOfWave * kChunkRows;
}

template <class T, bool kAhead>
struct TileBuffers {
  Vec16 rows[kAhead ? kBlock : 1][T::kChunks];  // rows of the next tile
  TileStage<T> stage[kStack];
  alignas(16) uint32_t thread_row_amax[kTileThreadRows][kLanes * T::kWords];
  alignas(16) float multiplier[T::kBlocks][kBlock];  // [block of a column][column]
  alignas(16) float row_multiplier[kBlock][T::kBlocks];
  int source[2][kBlock];   // the row of x that a row is, counted from the tile's first row; -1: zeros
  QuantizedTile tiles[8];  // the tile in work, the next two, and some that slow threads still store

  MOE_DEVICE QuantizedTile& tile(uint32_t iteration) { return tiles[iteration & 7]; }
};
template <class T>
MOE_HD constexpr size_t tile_shared_bytes(bool ahead, int64_t E) {
  return (ahead ? sizeof(TileBuffers<T, true>) : sizeof(TileBuffers<T, false>)) + 4 * T::Tiles::words(E);
}
template <class T>
MOE_HD constexpr bool copies_ahead(int shared) {
  return kHasAsyncCopies && tile_shared_bytes<T>(true, kMaxExperts) + kStaticShared <= size_t(shared);
}
template <class T>
using TileShared = TileBuffers<T, copies_ahead<T>(kMinSharedBytes)>;

template <class T>
MOE_DEVICE int64_t first_column(const QuantizedTile& tile) {
  return int64_t(tile.across) * kBlock + threadIdx.x * T::kColumns;
}

// Finds the rows of x that the rows of a tile are, one row per thread.
MOE_DEVICE void find_sources(const TilesPlan& p, const QuantizedTile& tile, int (&source)[kBlock]) {
  const int r = threadIdx.y * kLanes + threadIdx.x;
  if (r < kBlock) source[r] = r >= tile.rows ? -1 : p.index.at ? int(source_row(p.index, tile.first_row + r)) : r;
}
// Starts the copies of a tile to shared memory; rows and columns that x does not have become zeros.
template <class T>
MOE_DEVICE void copy_tile(const TilesPlan& p, const QuantizedTile& tile, const int (&source)[kBlock],
                          TileShared<T>& shared) {
  if constexpr (!copies_ahead<T>(kMinSharedBytes)) return;
  using Types = typename T::Types;
  constexpr int kStep = kTileThreads / T::kChunks;  // rows at once
  const int t = threadIdx.y * kLanes + threadIdx.x, chunk = t % T::kChunks;
  const int64_t column = int64_t(tile.across) * kBlock + chunk * Types::kVec;
  const auto* x = find_element<Types>(p, tile.x + column);
#pragma unroll
  for (int i = 0; i < kBlock / kStep; ++i) {
    const int r = t / T::kChunks + i * kStep;
    const auto* row = Types::advance(p, x, source[r] * p.row_stride);
    Vec16* to = &shared.rows[r][chunk];
    if (source[r] < 0 || column >= p.K) *to = Vec16{};
    else copy_words<Types, Reuse::kNotBeforeStores>(p, to, row, p.K - column);
  }
  commit_copies();
}
// Reads the lane's columns of 16 rows, once the copies have arrived.
template <class T>
MOE_DEVICE void read_tile(const TilesPlan& p, const QuantizedTile& tile, const int (&source)[kBlock],
                          const TileShared<T>& shared, TileWords<T>& v) {
  using Types = typename T::Types;
  using Words = std::conditional_t<T::kWords == 4, Vec16, Vec8>;
  const int64_t column = first_column<T>(tile);
  const auto* x = find_element<Types>(p, tile.x + column);
#pragma unroll
  for (int i = 0; i < kChunkRows; ++i) {
    const int r = threadIdx.y * kChunkRows + i;
    Words words = {};
    if constexpr (copies_ahead<T>(kMinSharedBytes)) {
      words = reinterpret_cast<const Words*>(shared.rows[r])[threadIdx.x];
    } else if (source[r] >= 0 && column < p.K) {
      const auto* row = Types::advance(p, x, source[r] * p.row_stride);
      words = load_words<Types, Words>(p, row, p.K - column);
    }
#pragma unroll
    for (int w = 0; w < T::kWords; ++w) v[i][w] = words.w[w];
  }
}

// Stores four bytes of a row of q. `count` columns are left in the row.
template <class T>
MOE_DEVICE void store_columns(uint8_t* q, int64_t count, uint32_t bytes) {
  if constexpr (T::Types::kVectorized) {
    store_stream(reinterpret_cast<uint32_t*>(q), bytes);
  } else {
#pragma unroll
    for (int i = 0; i < T::kColumns; ++i)
      if (i < count) q[i] = uint8_t(bytes >> (8 * i));
  }
}
// Casts and stores rows of q, with the multipliers that this wave has just made.
template <class T, class Shared>
MOE_DEVICE void cast_rows(const TilesPlan& p, const QuantizedTile& tile, const TileWords<T>& v, const Shared& shared) {
  wave_barrier();
  const auto* multiplier = shared.row_multiplier + threadIdx.y * kChunkRows;
  const int64_t column = first_column<T>(tile), count = p.K - column;
  uint8_t* q = p.q + (tile.first_row + threadIdx.y * kChunkRows) * p.K + column;
  const int rows = count > 0 ? in_thread_row(tile.rows) : 0;
  T::Types::with_cast(p, [&](auto cast) {
#pragma unroll
    for (int i = 0; i < kChunkRows; ++i, q += p.K) {
      const float m = multiplier[i][threadIdx.x / T::kLanesPerBlock];
      const uint32_t bytes = cast_words<typename T::In>(v[i], m, m, m, m, cast);
      if (i < rows) store_columns<T>(q, count, bytes);
    }
  });
}
// Maximum over the 16 rows, for every word of columns, in shared.thread_row_amax.
template <class T, class Shared>
MOE_DEVICE void reduce_rows(const TileWords<T>& v, Shared& shared) {
#pragma unroll
  for (int w = 0; w < T::kWords; ++w) {
    uint32_t amax = v[0][w];
#pragma unroll
    for (int i = 1; i < kChunkRows; ++i) amax = max_magnitude<typename T::In>(amax, v[i][w]);
    shared.thread_row_amax[threadIdx.y][threadIdx.x * T::kWords + w] = amax;
  }
}
// Blocks along rows: finds the maxima of the 16 rows and makes their multipliers.
template <class T, class Shared>
MOE_DEVICE void make_row_multipliers(const TilesPlan& p, const TileWords<T>& v, Shared& shared) {
  using In = typename T::In;
  constexpr int kRows = T::kLanesPerBlock < kChunkRows ? T::kLanesPerBlock : kChunkRows;  // at once
  constexpr int kLanesOfRow = T::kLanesPerBlock / kRows;
  const int lane = threadIdx.x, first = threadIdx.y * kChunkRows + lane % T::kLanesPerBlock / kLanesOfRow;
#pragma unroll
  for (int r = 0; r < kChunkRows; r += kRows) {
    uint32_t row_amax[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      row_amax[i] = v[r + i][0];
#pragma unroll
      for (int w = 1; w < T::kWords; ++w) row_amax[i] = max_magnitude<In>(row_amax[i], v[r + i][w]);
    }
    const uint32_t amax = amax_of_rows<In, T::kLanesPerBlock>(row_amax, lane);
    const auto s = T::Types::template scale_of<typename T::Scale>(p, amax);
    if (lane % kLanesOfRow == 0) shared.row_multiplier[first + r][lane / T::kLanesPerBlock] = s.multiplier;
  }
}
// Blocks along columns: makes their multipliers, one per thread at a time.
template <class T, class Shared>
MOE_DEVICE void make_column_multipliers(const TilesPlan& p, Shared& shared) {
  using In = typename T::In;
  constexpr int kThreadRowsOfBlock = kTileThreadRows / T::kBlocks;
#pragma unroll
  for (int at = threadIdx.y * kLanes + threadIdx.x; at < T::kBlocks * kBlock; at += kTileThreads) {
    const int block = at / kBlock, column = at % kBlock;
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kThreadRowsOfBlock; ++i)
      amax = max_magnitude<In>(amax, shared.thread_row_amax[block * kThreadRowsOfBlock + i][column / kPerWord<In>]);
    const uint32_t bits = magnitude_bits<In>(amax, column % kPerWord<In>);
    shared.multiplier[block][column] = T::Types::template scale_of<typename T::Scale>(p, bits).multiplier;
  }
}
// Squares: makes the multiplier of the tile, for all of its columns and, in a weight, for all of its rows.
template <class T, class Shared>
MOE_DEVICE void make_square_multiplier(const TilesPlan& p, Shared& shared) {
  using In = typename T::In;
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kTileThreadRows; ++i)
#pragma unroll
    for (int w = 0; w < T::kWords; ++w)
      amax = max_magnitude<In>(amax, shared.thread_row_amax[i][threadIdx.x * T::kWords + w]);
  amax = reduce_lanes<kLanes>(amax, MaxMagnitude<In>{});
  const float m = T::Types::template scale_of<typename T::Scale>(p, amax_bits<In>(amax)).multiplier;
  if (threadIdx.x >= kChunkRows) return;
  const int at = threadIdx.y * kChunkRows + threadIdx.x;
  shared.multiplier[0][at] = m;
  if (T::kScaling == Scaling::kSquares) shared.row_multiplier[at][0] = m;
}
// The multipliers of the columns, for the rows of this row of threads.
template <class T, class Shared>
MOE_DEVICE const float* column_multipliers(const Shared& shared) {
  return shared.multiplier[threadIdx.y * T::kBlocks / kTileThreadRows];
}

// Casts the columns and transposes them in a stage of shared memory.
template <class T, class Shared>
MOE_DEVICE void stage_columns(const TilesPlan& p, const QuantizedTile& tile, const TileWords<T>& v,
                              const Shared& shared, TileStage<T>& stage) {
  if (in_thread_row(tile.positions) <= 0) return;
  const int rows = in_thread_row(tile.group_rows);
  if (rows <= 0) return clear_chunks<T::kColumns>(stage);
  // One form serves whole and partial chunks: with both forms, 64 floats spill.
  T::Types::with_cast(p, [&](auto cast) {
    cast_chunks<typename T::In, false>(v, rows, column_multipliers<T>(shared), stage, cast);
  });
}
// Stores the columns of kTiles tiles that lie one below the other. Tile i is tile_of(i), and stages[i] holds its
// columns.
template <class T, int kTiles, class TileOf>
MOE_DEVICE void store_staged(const TilesPlan& p, TileStage<T>* stages, TileOf tile_of) {
  constexpr int kChunksPerColumn = kLineChunks * kTiles, kStep = kTileThreads / kChunksPerColumn;
  const int t = threadIdx.y * kLanes + threadIdx.x, chunk = t % kLineChunks;
  const int number = t % kChunksPerColumn / kLineChunks;
  const QuantizedTile& tile = tile_of(number);
  const int first = chunk * kChunkRows;
  if (first >= tile.positions) return;
  int local = t / kChunksPerColumn;
  uint8_t* out = p.q_t + tile.q_t + (int64_t(tile.across) * kBlock + local) * p.positions + first;
  // Fully unrolled, columns alone in blocks of 128 spill, and so does bfloat16 in MX blocks on Blackwell.
  constexpr bool kSpills = T::kBlocks == 1 ? T::kScaling == Scaling::kColumns
                                           : kConvertsE8M0 && std::is_same_v<typename T::In, BF16>;
  constexpr int kUnroll = kSpills ? 4 : kBlock / kStep;
#pragma unroll kUnroll
  for (int i = 0; i < kBlock / kStep; ++i, local += kStep, out += kStep * p.positions) {
    if (int64_t(tile.across) * kBlock + local >= p.K) return;
    store_chunk<T::Types::kVectorized>(out, stages[number].at(local, chunk), tile.positions - first);
  }
}

// Stages the columns of this iteration's tile, and stores them once its stack is complete.
template <class T>
MOE_DEVICE void cast_columns(const TilesPlan& p, const QuantizedTile& tile, const TileWords<T>& v,
                             TileShared<T>& shared, uint32_t iteration) {
  stage_columns<T>(p, tile, v, shared, shared.stage[iteration % kStack]);
  if (iteration % kStack != kStack - 1) return;
  __syncthreads();
  store_staged<T, kStack>(p, shared.stage,
                          [&](int i) -> const QuantizedTile& { return shared.tile(iteration + 1 - kStack + i); });
}

}  // namespace moe_fp8
