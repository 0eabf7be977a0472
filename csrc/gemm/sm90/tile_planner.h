// The source of a block's tiles: each producer finds them itself, or a planner in warp 3 writes them to tile slots.
// A planner serves K-grouped products, whose scheduler takes a whole warp, and the dynamic scheduler.
#pragma once
#include "gemm/sm90/pipeline/shared_storage.h"

namespace moe_fp8::sm90 {

// The counter of a DynamicScheduler: block 0 draws an index for the cluster and sends it to both blocks. It draws once
// the consumers of both have left the tile before the last planned one. Then that tile's slot is free, and the answer
// arrives while the planned tile is multiplied. An earlier draw would leave more tiles to a cluster that is late at the
// end.
template <class T>
class ClusterCounter {
 public:
  MOE_DEVICE ClusterCounter(const Args& p, SharedStorage<T>& shared) : p_(p), shared_(shared) {}
  MOE_DEVICE int next() {
    const uint32_t full = shared_address(&shared_.work_full[slot_]), word = shared_address(&shared_.work_index[slot_]);
    barrier_arrive_expect_tx(full, sizeof(uint32_t));
    if (cluster_rank() == 0) {
      const int previous = (slot_ + kTileSlots - 1) % kTileSlots;
      barrier_wait(shared_address(&shared_.tile_empty[previous]), slot_ == 0 ? phase_ ^ 1 : phase_);
      const int index = atomicAdd(p_.unit_counter, 1);
      for (int rank = 0; rank < 2; ++rank)
        store_async(cluster_address(word, rank), uint32_t(index), cluster_address(full, rank));
    }
    barrier_wait_for_cluster(full, phase_);
    const int index = int(as_bits(load_shared(word)));
    slot_ = (slot_ + 1) % kTileSlots;
    if (slot_ == 0) phase_ ^= 1;
    return index;
  }

 private:
  const Args& p_;
  SharedStorage<T>& shared_;
  int slot_ = 0;  // of the last planned tile
  uint32_t phase_ = 0;
};

// Runs a scheduler for this block; the cluster is the worker.
template <class T, class Scheduler>
class TileFinder {
 public:
  template <class... Counter>
  MOE_DEVICE TileFinder(const Args& p, const SharedStorage<T>& shared, const Counter&... counter)
      : p_(p), scheduler_(p, shared.groups, int(blockIdx.x) / 2, int(gridDim.x) / 2, counter...),
        rank_(int(cluster_rank())) {}
  MOE_DEVICE Tile next() { return Tile::of<T>(p_, scheduler_.next(rank_)); }

 private:
  const Args& p_;
  gemm::TileScheduler<T, Scheduler> scheduler_;
  int rank_;
};

template <class T, class Finder>
MOE_DEVICE void plan_tiles(SharedStorage<T>& shared, Finder finder) {
  const uint32_t full = shared_address(shared.tile_full), empty = shared_address(shared.tile_empty);
  uint32_t phase = 1;  // slots are empty at first: a wait for the phase before a barrier's first returns at once
  for (int slot = 0;; slot = (slot + 1) % kTileSlots) {
    const Tile tile = finder.next();
    if (threadIdx.x % 32 == 0) {
      if (T::kKGrouped) barrier_wait(empty + 8 * slot, phase);  // ClusterCounter has waited for the slot
      shared.tiles[slot] = tile;
      barrier_arrive(full + 8 * slot);
    }
    if (slot == kTileSlots - 1) phase ^= 1;
    if (!tile.valid) return;
  }
}
// Called by warp 3. Works as many tiles ahead as there are free slots; docs/kernels/gemm.md says what that gains.
template <class T>
MOE_DEVICE void plan_tiles(const Args& p, SharedStorage<T>& shared) {
  using Counter = ClusterCounter<T>;
  if constexpr (T::kKGrouped) plan_tiles(shared, TileFinder<T, typename T::Scheduler>(p, shared));
  else if (threadIdx.x % 32 == 0)
    plan_tiles(shared, TileFinder<T, gemm::DynamicScheduler<T, Counter>>(p, shared, Counter(p, shared)));
}

// A producer's tiles, in order.
template <class T>
class TileStream {
 public:
  MOE_DEVICE TileStream(const Args& p, const SharedStorage<T>& shared) : p_(p), shared_(shared), finder_(p, shared) {}
  MOE_DEVICE Tile next(int slot) {
    if (!has_planner<T>(p_)) return finder_.next();
    barrier_wait(shared_address(&shared_.tile_full[slot]), phase_);
    if (slot == kTileSlots - 1) phase_ ^= 1;
    return shared_.tiles[slot];
  }

 private:
  const Args& p_;
  const SharedStorage<T>& shared_;
  TileFinder<T, gemm::StaticScheduler<T>> finder_;
  uint32_t phase_ = 0;
};

}  // namespace moe_fp8::sm90
