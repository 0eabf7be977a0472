// The consumers: multiply the tiles in turn, and scale the sums and store or add them.
#pragma once
#include "gemm/sm90/epilogue/add.h"
#include "gemm/sm90/pipeline/mx.h"
#include "gemm/sm90/pipeline/promoted.h"
#include "gemm/sm90/pipeline/gather_rows.h"

namespace moe_fp8::sm90 {

// Of 128 rows of the tile, the scales of the thread's two.
template <class T>
MOE_DEVICE void load_row_scales(const Args& p, const Tile& tile, int row, float (&scale)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool there = row + 8 * h < tile.rows;
    const int64_t at = tile.row + row + 8 * h, source = there && by_index<T>(p) ? p.index.row(at) : at;
    scale[h] = there && source >= 0 ? p.scale_a[source] : 0.f;
  }
}

template <int kElement, class T, class Value>
MOE_DEVICE void finish_tile_of(const Args& p, const Consumer<T>& c, const Tile& tile, Shared<T>& shared, int half,
                               Value value) {
  if constexpr (T::kAdds) add_tile<kElement>(p, c, tile, shared, half, value);
  else store_tile<kElement>(p, c, tile, shared, half, value);
}
template <class T, class Value>
MOE_DEVICE void finish_tile(const Args& p, const Consumer<T>& c, const Tile& tile, Shared<T>& shared, int half,
                            Value value) {
  if (p.element == 4) finish_tile_of<4>(p, c, tile, shared, half, value);
  else finish_tile_of<2>(p, c, tile, shared, half, value);
}

template <class T>
MOE_DEVICE void consume_rows(const Args& p, Consumer<T>& c, Shared<T>& shared, const Tile& tile, int turn) {
  float sum[T::kTileColumns / 2], of_row[2];
  load_row_scales<T>(p, tile, c.row(), of_row);
  if (tile.columns > T::kTileColumns / 2) multiply_rows(c, tile, turn, sum);
  else multiply_rows(c, tile, turn, reinterpret_cast<float(&)[T::kTileColumns / 4]>(sum));
  const float* of_columns = shared.scale_b[turn] + 2 * (c.lane() % 4);
  finish_tile(p, c, tile, shared, 0, [&](int h, int j, int i) {
    return sum[j * 4 + 2 * h + i] * of_row[h] * of_columns[8 * j + i];
  });
}
template <class T>
MOE_DEVICE void consume_mx(const Args& p, Consumer<T>& c, Shared<T>& shared, const Tile& tile) {
  float sum[T::kTileColumns / 2];
  if (tile.columns > T::kTileColumns / 2) multiply_mx(c, shared, tile, sum);
  else multiply_mx(c, shared, tile, reinterpret_cast<float(&)[T::kTileColumns / 4]>(sum));
  finish_tile(p, c, tile, shared, 0, [&](int h, int j, int i) { return sum[j * 4 + 2 * h + i]; });
}
template <class T>
MOE_DEVICE void consume_promoted(const Args& p, Consumer<T>& c, Shared<T>& shared, const Tile& tile, int turn) {
  float sum[2][T::kTileColumns / 2];
  const bool two = tile.rows > 128 + c.group() * kWgmmaRows;
  if (two) multiply_promoted<2>(c, shared, tile, sum);
  else multiply_promoted<1>(c, shared, tile, sum);
  const float* of_columns = shared.scale_b[turn] + 2 * (c.lane() % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half == 1 && !two) break;
    float of_row[2];
    if (!T::kBlockScales) load_row_scales<T>(p, tile, c.row() + 128 * half, of_row);
    finish_tile(p, c, tile, shared, half, [&](int h, int j, int i) {
      const float f = sum[half][j * 4 + 2 * h + i];
      return T::kBlockScales ? f : f * of_row[h] * of_columns[8 * j + i];
    });
  }
}

template <class T>
MOE_DEVICE void consume(const Args& p, Shared<T>& shared) {
  Consumer<T> c(p, shared);
  for (int turn = 0;; turn = (turn + 1) % kTurns) {
    const Tile& tile = shared.tiles[turn];
    const int first = first_stage<T>(p, turn);
    c.wait_full(first);
    if (!tile.there) return;
    if constexpr (T::kAdds)
      if (tile.depth > 0) prefetch_tile(p, c, tile);
    const bool mine = tile.rows > c.group() * kWgmmaRows && tile.columns > 0;
    if (!mine || (T::kSumGroups && tile.depth == 0)) {
      c.step_over(first, stages_of<T>(p, tile));
      if constexpr (!T::kAdds)
        for (int half = 0; mine && half < T::kTileRows / 128; ++half)
          finish_tile(p, c, tile, shared, half, [](int, int, int) { return 0.f; });
    } else if constexpr (T::kMx) {
      consume_mx(p, c, shared, tile);
    } else if constexpr (T::kPromoted) {
      consume_promoted(p, c, shared, tile, turn);
    } else {
      consume_rows(p, c, shared, tile, turn);
    }
    if (is_planned<T>(p)) {
      __syncwarp();
      const uint32_t done = shared_address(&shared.done[turn]);
      if (c.lane() == 0) T::kSumGroups ? barrier_arrive(done) : barrier_arrive_in_cluster(in_block(done, 0));
    }
  }
}

}  // namespace moe_fp8::sm90
