// The consumers' loop over tiles: multiply, scale, and hand the values to the epilogue.
#pragma once
#include "gemm/sm90/pipeline/mainloop_fast.h"
#include "gemm/sm90/pipeline/mainloop_mx.h"
#include "gemm/sm90/pipeline/mainloop_promoted.h"

namespace moe_fp8::sm90 {

// Loads the scales of the thread's two rows, among 128 rows of the tile.
template <class T>
MOE_DEVICE void load_row_scales(const Args& p, const Tile& tile, int row, float (&scale)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool valid = row + 8 * h < tile.rows;
    const int64_t at = tile.out_row + row + 8 * h, source = valid && gathers_rows<T>(p) ? p.row_index.row(at) : at;
    scale[h] = valid && source >= 0 ? p.scale_a[source] : 0.f;
  }
}

template <class T>
MOE_DEVICE void compute_fast_tile(const typename T::KernelArgs& p, Consumer<T>& c, SharedStorage<T>& shared,
                                  const Tile& tile, int slot) {
  float sum[T::kTileN / 2], row_scale[2];
  load_row_scales<T>(p, tile, c.row(), row_scale);
  if (tile.columns > T::kTileN / 2) multiply_fast(c, tile, slot, sum);
  else multiply_fast(c, tile, slot, reinterpret_cast<float(&)[T::kTileN / 4]>(sum));
  const float* column_scale = shared.scale_b[slot] + 2 * (c.lane() % 4);
  T::Epilogue::template finish_tile<T>(p, c, tile, shared, 0, [&](int h, int j, int i) {
    return sum[j * 4 + 2 * h + i] * row_scale[h] * column_scale[8 * j + i];
  });
}
template <class T>
MOE_DEVICE void compute_mx_tile(const typename T::KernelArgs& p, Consumer<T>& c, SharedStorage<T>& shared,
                                const Tile& tile) {
  float sum[T::kTileN / 2];
  if (tile.columns > T::kTileN / 2) multiply_mx(c, shared, tile, sum);
  else multiply_mx(c, shared, tile, reinterpret_cast<float(&)[T::kTileN / 4]>(sum));
  T::Epilogue::template finish_tile<T>(p, c, tile, shared, 0,
                                       [&](int h, int j, int i) { return sum[j * 4 + 2 * h + i]; });
}
template <class T>
MOE_DEVICE void compute_promoted_tile(const typename T::KernelArgs& p, Consumer<T>& c, SharedStorage<T>& shared,
                                      const Tile& tile, int slot) {
  float sum[2][T::kTileN / 2];
  const bool both_halves = tile.rows > 128 + c.group() * kWgmmaRows;
  if (both_halves) multiply_promoted<2>(c, shared, tile, sum);
  else multiply_promoted<1>(c, shared, tile, sum);
  if constexpr (T::Epilogue::kAddsLowRank) {
    static_assert(T::kBlockScales, "sums are scaled before the term is added");
    if (both_halves) T::Epilogue::template add_low_rank<2, T>(p, c, tile, sum);
    else T::Epilogue::template add_low_rank<1, T>(p, c, tile, sum);
  }
  const float* column_scale = shared.scale_b[slot] + 2 * (c.lane() % 4);
#pragma unroll
  for (int row_half = 0; row_half < 2; ++row_half) {
    if (row_half == 1 && !both_halves) break;
    float row_scale[2];
    if (!T::kBlockScales) load_row_scales<T>(p, tile, c.row() + 128 * row_half, row_scale);
    T::Epilogue::template finish_tile<T>(p, c, tile, shared, row_half, [&](int h, int j, int i) {
      const float f = sum[row_half][j * 4 + 2 * h + i];
      return T::kBlockScales ? f : f * row_scale[h] * column_scale[8 * j + i];
    });
  }
}

// Called by both consumer warpgroups.
template <class T>
MOE_DEVICE void consume_tiles(const typename T::KernelArgs& p, SharedStorage<T>& shared) {
  Consumer<T> c(p, shared);
  for (int slot = 0;; slot = (slot + 1) % kTileSlots) {
    const Tile& tile = shared.tiles[slot];
    const int first = first_stage<T>(p, slot);
    c.wait_stage(first);
    if (!tile.valid) return;
    if (tile.k_size > 0) T::Epilogue::template prefetch_tile<T>(p, c, tile);
    const bool has_rows = tile.rows > c.group() * kWgmmaRows && tile.columns > 0;  // the warpgroup, in this tile
    if (!has_rows || (T::kKGrouped && tile.k_size == 0)) {
      c.skip_stages(first, tile_stages<T>(p, tile));
      if (has_rows) T::Epilogue::template finish_empty_tile<T>(p, c, tile, shared);
    } else if constexpr (T::kMx) {
      compute_mx_tile(p, c, shared, tile);
    } else if constexpr (T::kPromoted) {
      compute_promoted_tile(p, c, shared, tile, slot);
    } else {
      compute_fast_tile(p, c, shared, tile, slot);
    }
    if (has_planner<T>(p)) {
      __syncwarp();
      const uint32_t empty = shared_address(&shared.tile_empty[slot]);
      if (c.lane() == 0) T::kKGrouped ? barrier_arrive(empty) : barrier_arrive_in_cluster(cluster_address(empty, 0));
    }
  }
}

}  // namespace moe_fp8::sm90
