// Which tiles a block works on, in turn: found by each of its producers, or planned ahead of them, by a warp where
// groups divide the sum, which takes longer, and by a thread where units are drawn from a counter.
#pragma once
#include "gemm/sm90/pipeline/stages.h"

namespace moe_fp8::sm90 {

// What a cluster draws from the counter: the first block, for both. The next number is drawn when the consumers of both
// have left the tile before the last one that is known: so there is room for its tile, and while they multiply that one
// the number comes. Drawn earlier, more tiles would wait in the end for a cluster that is late.
template <class T>
class DrawnByCluster {
 public:
  MOE_DEVICE DrawnByCluster(const Args& p, Shared<T>& shared) : p_(p), shared_(shared) {}
  MOE_DEVICE int next() {
    const uint32_t arrived = shared_address(&shared_.arrived[turn_]), drawn = shared_address(&shared_.drawn[turn_]);
    barrier_arrive_expecting(arrived, sizeof(uint32_t));
    if (cluster_rank() == 0) {
      const int before = (turn_ + kTurns - 1) % kTurns;
      barrier_wait(shared_address(&shared_.done[before]), turn_ == 0 ? phase_ ^ 1 : phase_);
      const int number = atomicAdd(p_.counter, 1);
      for (int rank = 0; rank < 2; ++rank)
        store_in_cluster(in_block(drawn, rank), uint32_t(number), in_block(arrived, rank));
    }
    barrier_wait_for_cluster(arrived, phase_);
    const int number = int(as_bits(load_shared(drawn)));
    turn_ = (turn_ + 1) % kTurns;
    if (turn_ == 0) phase_ ^= 1;
    return number;
  }

 private:
  const Args& p_;
  Shared<T>& shared_;
  int turn_ = 0;  // of the last tile that is known
  uint32_t phase_ = 0;
};

template <class T, class Deal>
class FoundTiles {
 public:
  template <class... Counter>
  MOE_DEVICE FoundTiles(const Args& p, const Shared<T>& shared, const Counter&... counter)
      : p_(p), schedule_(p, shared.groups, int(blockIdx.x) / 2, int(gridDim.x) / 2, counter...),
        rank_(int(cluster_rank())) {}
  MOE_DEVICE Tile next() { return Tile::of<T>(p_, schedule_.next(rank_)); }

 private:
  const Args& p_;
  gemm::Schedule<T, Deal> schedule_;
  int rank_;
};

template <class T, class Tiles>
MOE_DEVICE void plan_tiles(Shared<T>& shared, Tiles tiles) {
  const uint32_t known = shared_address(shared.known), done = shared_address(shared.done);
  uint32_t phase = 1;  // as of empty stages
  for (int turn = 0;; turn = (turn + 1) % kTurns) {
    const Tile tile = tiles.next();
    if (threadIdx.x % 32 == 0) {
      if (T::kSumGroups) barrier_wait(done + 8 * turn, phase);  // else there is room when a number is drawn
      shared.tiles[turn] = tile;
      barrier_arrive(known + 8 * turn);
    }
    if (turn == kTurns - 1) phase ^= 1;
    if (!tile.there) return;
  }
}
// Of groups of the sum by a warp, as far ahead as there is room. By a producer, between its tiles, it cost more than it
// gave: even groups of [65536, 512, 1536] for 40 experts took 154 us on an H200, in rounds or planned 107 to 116.
template <class T>
MOE_DEVICE void plan_tiles(const Args& p, Shared<T>& shared) {
  using Counter = DrawnByCluster<T>;
  if constexpr (T::kSumGroups) plan_tiles(shared, FoundTiles<T, typename T::Deal>(p, shared));
  else if (threadIdx.x % 32 == 0)
    plan_tiles(shared, FoundTiles<T, gemm::ByCounter<T, Counter>>(p, shared, Counter(p, shared)));
}

// Of a producer.
template <class T>
class TilesInTurn {
 public:
  MOE_DEVICE TilesInTurn(const Args& p, const Shared<T>& shared) : p_(p), shared_(shared), found_(p, shared) {}
  MOE_DEVICE Tile next(int turn) {
    if (!is_planned<T>(p_)) return found_.next();
    barrier_wait(shared_address(&shared_.known[turn]), phase_);
    if (turn == kTurns - 1) phase_ ^= 1;
    return shared_.tiles[turn];
  }

 private:
  const Args& p_;
  const Shared<T>& shared_;
  FoundTiles<T, gemm::InRounds<T>> found_;
  uint32_t phase_ = 0;
};

}  // namespace moe_fp8::sm90
