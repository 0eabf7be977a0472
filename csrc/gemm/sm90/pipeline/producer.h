// The producer of operands, and the loop that all producers share.
#pragma once
#include "gemm/sm90/tile_planner.h"

namespace moe_fp8::sm90 {

// Calls fill(tile, slot, k, stage) for every stage of every tile, as soon as the stage is empty, and for one stage of
// the invalid tile at the end. Each call must lead to the producer's arrival at the stage's full barrier.
template <class T, class Fill>
MOE_DEVICE void for_each_stage(const Args& p, SharedStorage<T>& shared, Fill fill) {
  const uint32_t empty = shared_address(shared.stage_empty);
  uint32_t phase = 1;  // stages are empty at first: a wait for the phase before a barrier's first returns at once
  TileStream<T> tiles(p, shared);
  for (int slot = 0;; slot = (slot + 1) % kTileSlots) {
    const Tile tile = tiles.next(slot);
    const int first = first_stage<T>(p, slot), stages = tile.valid ? tile_stages<T>(p, tile) : 1;
    for (int k = 0; k < stages; ++k) {
      const int s = (first + k) % kStages;
      barrier_wait(empty + 8 * s, phase);
      if (s == kStages - 1) phase ^= 1;
      fill(tile, slot, k, s);
    }
    if (!tile.valid) return;
  }
}

// Called by thread 0. Copies the boxes of a and b; of the operand that both tiles of the pair share, each block copies
// one half to both blocks.
template <class T>
MOE_DEVICE void produce_operands(const Args& p, SharedStorage<T>& shared) {
  const int rank = int(cluster_rank());
  const uint32_t a = shared_address(shared.a), b = shared_address(shared.b);
  const uint32_t stage_full = shared_address(shared.stage_full);
  for_each_stage(p, shared, [&](const Tile& tile, int slot, int k, int s) {
    const uint32_t full = stage_full + 8 * s;
    if (!has_planner<T>(p) && k == 0) shared.tiles[slot] = tile;
    if (k >= k_tiles<T>(tile)) return barrier_arrive(full);
    const int at_k = tile.k_begin + k * T::kStageK;
    const auto copy_a = [&](int box, auto copy) {
      copy(a + s * T::kStageBytesA + box * kWgmmaRows * T::kStageK, p.a_map, at_k, tile.a_row + box * kWgmmaRows, full);
    };
    const auto copy_b = [&](int box, auto copy) {
      copy(b + s * T::kStageBytesB + box * T::kBoxN * kRowBytes, p.b_map, at_k * T::kElementBytesB,
           tile.b_row + box * T::kBoxN, full);
    };
    const int a_boxes = gathers_rows<T>(p) ? 0 : tile.rows > 128 ? 4 : 2;
    barrier_arrive_expect_tx(full, a_boxes * kWgmmaRows * T::kStageK + T::kStageBytesB);
    if (tile.multicast_a) {
      for (int i = 0; i < a_boxes / 2; ++i) copy_a(a_boxes / 2 * rank + i, tma_load_box_multicast);
      for (int i = 0; i < T::kTileN / T::kBoxN; ++i) copy_b(i, tma_load_box);
    } else {
      for (int i = 0; i < a_boxes; ++i) copy_a(i, tma_load_box);
      copy_b(rank, tma_load_box_multicast);
    }
  });
}

}  // namespace moe_fp8::sm90
