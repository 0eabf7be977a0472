// The producers of scales: one of them runs in warp 1.
#pragma once
#include "gemm/sm90/pipeline/producer.h"

namespace moe_fp8::sm90 {

// The scale block of stage k. Wrong offsets may point beyond the scales, hence the bound.
MOE_DEVICE int scale_block(const Args& p, const Tile& tile, int k) {
  return up_to(tile.first_scale_block + k, p.scale_blocks - 1);
}

// Finds the blocked scales of a. In an M-grouped product every group is padded to whole blocks of 128 rows, one group
// after another. In a K-grouped product the groups of a block of rows follow one another.
template <class T>
class MxScales {
 public:
  MOE_DEVICE MxScales(const Args& p, const gemm::GroupOffsets& groups) : p_(p), groups_(groups) {}
  // The scales of a tile's rows. Experts must not fall from call to call.
  MOE_DEVICE const uint8_t* tile_scales(const Tile& tile) {
    const auto* scales = reinterpret_cast<const uint8_t*>(p_.scale_a);
    if constexpr (T::kKGrouped) {
      const int64_t column = int64_t(tile.first_scale_block) * kScaleColumns;
      const int64_t line = ceil_div(tile.k_size, kGroupScales);
      return scales + column * p_.scale_a_stride + tile.a_row / kScaleRows * line * kScaleBytes;
    } else {
      for (; expert_ < tile.expert; ++expert_) blocks_before_ += ceil_div(groups_.size(expert_), kScaleRows);
      const int64_t row = blocks_before_ + (tile.a_row - groups_.offsets[expert_]) / kScaleRows;
      return scales + row * ceil_div(p_.scale_blocks, kScaleColumns) * kScaleBytes;
    }
  }

 private:
  const Args& p_;
  const gemm::GroupOffsets& groups_;
  int expert_ = 0, blocks_before_ = 0;  // blocks of rows in the groups before expert_
};
// MXFP8. Called by thread 32. A block of scales serves two stages and comes with the first of them.
template <class T>
MOE_DEVICE void produce_mx_scales(const Args& p, SharedStorage<T>& shared) {
  static_assert(2 * T::kStageK == kGroupScales && T::kTileM == kScaleRows && kStages % 2 == 0);
  const uint32_t stage_full = shared_address(shared.stage_full);
  MxScales<T> scales(p, shared.groups);
  const uint8_t* from = nullptr;
  for_each_stage(p, shared, [&](const Tile& tile, int, int k, int s) {
    const uint32_t full = stage_full + 8 * s;
    if (k % 2 != 0 || k >= k_tiles<T>(tile)) return barrier_arrive(full);
    if (k == 0) from = scales.tile_scales(tile);
    barrier_arrive_expect_tx(full, kScaleBytes);
    bulk_copy(shared_address(shared.scale_a[s]), from + k / 2 * kScaleBytes, kScaleBytes, full);
  });
}

// Scales of the 128 x 128 squares of b: one per stage, shared by all columns of a tile. A warp loads them 32 stages at
// a time, one per lane, and at least 32 stages ahead; docs/kernels/gemm.md compares this with a load per stage.
template <class T>
class SquareScales {
 public:
  MOE_DEVICE SquareScales(const Args& p, int lane) : p_(p), lane_(lane) {}
  // Called by all lanes for every stage of a tile in order: lane `k % 32` gets the scale of stage k.
  MOE_DEVICE float at(const Tile& tile, int k) {
    if (k == 0) next_ = load(tile, lane_);
    if (k % 32 == 0) {
      current_ = next_;
      next_ = load(tile, k + 32 + lane_);
    }
    return current_;
  }

 private:
  MOE_DEVICE float load(const Tile& tile, int k) const {
    if (k >= k_tiles<T>(tile) || tile.columns <= 0) return 0.f;
    const int square = tile.column / kBlock;
    if (T::kKGrouped) return p_.scale_b[int64_t(scale_block(p_, tile, k)) * p_.scale_b_stride + square];
    return p_.scale_b[(int64_t(tile.expert) * ceil_div(p_.N, kBlock) + square) * p_.scale_blocks + k];
  }

  const Args& p_;
  int lane_;
  float current_ = 0.f, next_ = 0.f;
};
// Block scales of both operands. Called by warp 1; lane `k % 32` serves stage k.
template <class T>
MOE_DEVICE void produce_block_scales(const Args& p, SharedStorage<T>& shared) {
  const uint32_t stage_full = shared_address(shared.stage_full);
  const int lane = int(threadIdx.x) % 32;
  SquareScales<T> squares(p, lane);
  for_each_stage(p, shared, [&](const Tile& tile, int, int k, int s) {
    const uint32_t full = stage_full + 8 * s;
    const float square = T::kColumnScales ? 0.f : squares.at(tile, k);
    __syncwarp();  // a lane that lags behind could miss a phase of the empty barrier
    if (lane != k % 32) return;
    if (tile.columns <= 0 || k >= k_tiles<T>(tile)) return barrier_arrive(full);
    const int64_t block = scale_block(p, tile, k);
    const int columns = T::kColumnScales ? up_to(tile.columns, T::kTileN) : 0;
    const int row = tile.a_row & ~3, rows = up_to(round_up(p.M, 4) - row, T::kTileM + 4);
    if (!T::kColumnScales) shared.scale_b[s][0] = square;
    barrier_arrive_expect_tx(full, 4 * (rows + columns));
    bulk_copy(shared_address(shared.scale_a[s]), p.scale_a + block * p.scale_a_stride + row, 4 * rows, full);
    if (T::kColumnScales)
      bulk_copy(shared_address(shared.scale_b[s]), p.scale_b + block * p.scale_b_stride + tile.column, 4 * columns,
                 full);
  });
}
// Row scales of b, once per tile. Called by thread 32. Consumers load the scales of their rows of a themselves.
template <class T>
MOE_DEVICE void produce_tile_scales(const Args& p, SharedStorage<T>& shared) {
  const uint32_t stage_full = shared_address(shared.stage_full);
  for_each_stage(p, shared, [&](const Tile& tile, int slot, int k, int s) {
    const uint32_t full = stage_full + 8 * s;
    if (k > 0 || tile.columns <= 0 || tile.k_size == 0) return barrier_arrive(full);
    const int columns = up_to(tile.columns, T::kTileN);
    const float* from = p.scale_b + int64_t(tile.expert) * p.N + tile.column;
    barrier_arrive_expect_tx(full, 4 * columns);
    bulk_copy(shared_address(shared.scale_b[slot]), from, 4 * columns, full);
  });
}

}  // namespace moe_fp8::sm90
