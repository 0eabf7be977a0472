// The producers: one thread starts the copies of operands, another those of the scales that come with them.
#pragma once
#include "gemm/sm90/stages.h"

namespace moe_fp8::sm90 {

// Waits for the stages of all tiles in turn, and for one behind the last: fill(tile, turn, k, stage) arms each.
template <class T, class Fill>
MOE_DEVICE void for_each_stage(const Args& p, Shared<T>& shared, Fill fill) {
  const uint32_t empty = shared_address(shared.empty);
  uint32_t phase = 1;  // the one before a barrier's first: stages are empty to begin with
  Schedule<T> schedule(p, shared.groups, int(cluster_rank()));
  for (int turn = 0;; turn ^= 1) {
    const Tile tile = schedule.next();
    const int stages = tile.there ? rounds_of(tile) * kStages : 1;
    for (int k = 0; k < stages; ++k) {
      const int s = k % kStages;
      barrier_wait(empty + 8 * s, phase);
      if (s == kStages - 1) phase ^= 1;
      fill(tile, turn, k, s);
    }
    if (!tile.there) return;
  }
}

template <class T>
MOE_DEVICE void produce_operands(const Args& p, Shared<T>& shared) {
  const int rank = int(cluster_rank());
  const uint32_t a_of = shared_address(shared.a), b_of = shared_address(shared.b);
  const uint32_t full_of = shared_address(shared.full);
  for_each_stage(p, shared, [&](const Tile& tile, int turn, int k, int s) {
    const uint32_t full = full_of + 8 * s;
    if (k == 0) shared.tiles[turn] = tile;
    if (k >= steps_of(tile)) return barrier_arrive(full);
    const uint32_t a = a_of + s * T::kStageBytesA, b = b_of + s * T::kStageBytesB;
    const int at = tile.first + k * kDepth;
    if constexpr (T::kTileRows == kPairRows) {
      const bool low = tile.rows <= 128;
      const int rows = low ? 64 : 128;
      barrier_arrive_expecting(full, 2 * rows * kDepth + T::kStageBytesB);
      copy_box_to_both(a + rank * rows * kDepth, low ? p.a_half : p.a, at, tile.row_of_a + rank * rows, full);
      copy_box(b, p.b, at, tile.row_of_b, full);
    } else {
      barrier_arrive_expecting(full, T::kStageBytesA + T::kStageBytesB);
      if (tile.beside) {
        copy_box_to_both(a + rank * (T::kStageBytesA / 2), p.a_half, at, tile.row_of_a + rank * 64, full);
        copy_box(b, p.b, at, tile.row_of_b, full);
        copy_box(b + T::kStageBytesB / 2, p.b, at, tile.row_of_b + T::kBoxColumns, full);
      } else {
        copy_box(a, p.a, at, tile.row_of_a, full);
        copy_box_to_both(b + rank * (T::kStageBytesB / 2), p.b, at, tile.row_of_b + rank * T::kBoxColumns, full);
      }
    }
  });
}

template <class T>
MOE_DEVICE void produce_scales(const Args& p, Shared<T>& shared) {
  const uint32_t full_of = shared_address(shared.full);
  for_each_stage(p, shared, [&](const Tile& tile, int turn, int k, int s) {
    const uint32_t full = full_of + 8 * s;
    if (tile.columns <= 0 || k >= (T::kBlockScales ? steps_of(tile) : up_to(steps_of(tile), 1)))
      return barrier_arrive(full);
    const int columns = up_to(tile.columns, T::kTileColumns);
    if constexpr (!T::kBlockScales) {
      barrier_arrive_expecting(full, 4 * columns);
      const float* of_columns = p.scale_b + int64_t(tile.expert) * p.N + tile.column;
      copy_bytes(shared_address(shared.scale_b[turn]), of_columns, 4 * columns, full);
    } else {
      const int block = up_to(tile.first_block + k, p.scale_blocks - 1);  // what offsets say is not trusted
      const int row = tile.row_of_a & ~3, rows = up_to(round_up(p.M, 4) - row, T::kTileRows + 4);
      const float* of_rows = p.scale_a + int64_t(block) * p.scale_a_stride + row;
      const float* of_columns;
      int count = 4;
      if constexpr (T::kSumGroups) {
        of_columns = p.scale_b + int64_t(block) * p.scale_b_stride + tile.column;
        count = columns;
      } else {
        const int64_t row_of_blocks = tile.expert * ceil_div(p.N, kDepth) + tile.column / kDepth;
        const int64_t at = row_of_blocks * p.scale_blocks + k;
        of_columns = p.scale_b + (at & ~int64_t(3));
      }
      barrier_arrive_expecting(full, 4 * (rows + count));
      copy_bytes(shared_address(shared.scale_a[s]), of_rows, 4 * rows, full);
      copy_bytes(shared_address(shared.scale_b[s]), of_columns, 4 * count, full);
    }
  });
}

}  // namespace moe_fp8::sm90
