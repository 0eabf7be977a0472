// The producer: starts the copies of all operands and of the scales that come with them.
#pragma once
#include "gemm/sm90/stages.h"

namespace moe_fp8::sm90 {

// Floats from a matrix of scales, with what a barrier waits for.
struct ScaleCopy {
  uint32_t to;
  const float* from;
  int count;  // a multiple of 4
};

// The scales that come with stage k of a tile: f(copy) for each.
template <class T, class F>
MOE_DEVICE void for_each_scale(const Args& p, Shared& shared, const Tile& tile, int turn, int k, F f) {
  if constexpr (!T::kBlockScales) {
    if (k > 0 || tile.columns <= 0) return;
    f(ScaleCopy{shared_address(shared.of_columns[turn]), p.scale_b + int64_t(tile.expert) * p.N + tile.column,
                up_to(tile.columns, kTileColumns)});
  } else {
    const int row = tile.row_of_a & ~3;
    f(ScaleCopy{shared_address(shared.scale_a[k % kStages]), p.scale_a + int64_t(k) * p.scale_a_stride + row,
                up_to(p.scale_a_stride - row, kTileRows + 4)});
    const int blocks = steps_of(tile), rows = ceil_div(p.N, kDepth);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row_of_blocks = tile.column / kDepth + h;
      if (row_of_blocks >= rows) return;
      const int64_t at = (int64_t(tile.expert) * rows + row_of_blocks) * blocks + k;
      f(ScaleCopy{shared_address(shared.scale_b[k % kStages][h]), p.scale_b + (at & ~int64_t(3)), 4});
    }
  }
}

// A stage's part of both operands.
MOE_DEVICE void copy_operands(const Args& p, const Tile& tile, int rank, int k, uint32_t a, uint32_t b, uint32_t full) {
  const int at = tile.first + k * kDepth;
  if (tile.beside) {
    copy_box_to_both(a + rank * (kStageBytesA / 2), p.a_half, at, tile.row_of_a + rank * (kTileRows / 2), full);
    copy_box(b, p.b_half, at, tile.row_of_b, full);
    copy_box(b + kStageBytesB / 2, p.b_half, at, tile.row_of_b + kTileColumns / 2, full);
  } else {
    copy_box(a, p.a, at, tile.row_of_a, full);
    copy_box_to_both(b + rank * (kStageBytesB / 2), p.b_half, at, tile.row_of_b + rank * (kTileColumns / 2), full);
  }
}

template <class T>
MOE_DEVICE void produce(const Args& p, Shared& shared) {
  const int rank = int(cluster_rank());
  const uint32_t a = shared_address(shared.a), b = shared_address(shared.b);
  const uint32_t full_of = shared_address(shared.full), empty_of = shared_address(shared.empty);
  uint32_t phase = 1;  // the one before a barrier's first: stages are empty to begin with
  Schedule<T::kGrouped> schedule(shared.groups, p.E, p.M, p.N, p.K, rank);
  for (int turn = 0;; turn ^= 1) {
    const Tile tile = schedule.next();
    barrier_wait(empty_of, phase);
    shared.tiles[turn] = tile;
    if (!tile.there) return barrier_arrive(full_of);
    const int steps = steps_of(tile), stages = rounds_of(tile) * kStages;
    for (int k = 0; k < stages; ++k) {
      const int s = k % kStages;
      const uint32_t full = full_of + 8 * s;
      if (k > 0) barrier_wait(empty_of + 8 * s, phase);
      if (s == kStages - 1) phase ^= 1;
      if (k >= steps) {
        barrier_arrive(full);
        continue;
      }
      uint32_t bytes = kStageBytesA + kStageBytesB;
      for_each_scale<T>(p, shared, tile, turn, k, [&](const ScaleCopy& c) { bytes += 4 * c.count; });
      barrier_arrive_expecting(full, bytes);
      for_each_scale<T>(p, shared, tile, turn, k,
                        [&](const ScaleCopy& c) { copy_bytes(c.to, c.from, 4 * c.count, full); });
      copy_operands(p, tile, rank, k, a + s * kStageBytesA, b + s * kStageBytesB, full);
    }
  }
}

}  // namespace moe_fp8::sm90
