// The static and the dynamic scheduler, which choose a worker's next work unit. longest_first.h has the third.
//
// A worker computes one work unit at a time: a tile, or neighbouring tiles of one group that share operands. A
// worker is a block, or a cluster of blocks. T: the traits of tile_scheduler.h.
#pragma once
#include "gemm/schedule/group_offsets.h"

namespace moe_fp8::gemm {

struct WorkUnit { int expert = -1, index = 0; };  // index: within the group; expert -1: no unit is left

// Maps global indices of work units to groups of an M-grouped product. Indices must not fall from call to call.
class GroupCursor {
 public:
  MOE_DEVICE explicit GroupCursor(const GroupOffsets& groups) : groups_(groups) {}
  MOE_DEVICE WorkUnit unit(int index) {
    while (index >= groups_.units_before(expert_ + 1)) ++expert_;
    return {expert_, index - groups_.units_before(expert_)};
  }

 private:
  const GroupOffsets& groups_;
  int expert_ = 0;
};

// Serpentine rounds: every worker takes one unit of a round, in rising order of workers in even rounds and in falling
// order in odd ones. Workers share no state, so none waits for another. Groups along K come by falling size, because
// the cost of a unit grows with it: so the units of a round end together.
template <class T>
class StaticScheduler {
 public:
  using Args = typename T::Args;
  static constexpr int kMaxWorkers = INT32_MAX;

  MOE_DEVICE StaticScheduler(const Args& p, const GroupOffsets& groups, int worker, int workers)
      : p_(p), groups_(groups), worker_(worker), workers_(workers), cursor_(groups) {}

  MOE_DEVICE WorkUnit next() {
    const int index = round_ * workers_ + (round_ % 2 ? workers_ - 1 - worker_ : worker_);
    if (index >= (T::k_grouped(p_) ? p_.E * units_per_group() : groups_.units_before(p_.E))) return {};
    ++round_;
    if (T::k_grouped(p_)) {
      const int rank = index / units_per_group();
      return {groups_.by_size[rank], index - rank * units_per_group()};
    }
    return cursor_.unit(index);
  }

 private:
  MOE_DEVICE int units_per_group() const { return typename T::Units(p_, p_.M).count(); }  // K-grouped: all the same

  const Args& p_;
  const GroupOffsets& groups_;
  int worker_, workers_, round_ = 0;
  GroupCursor cursor_;
};

// M-grouped products: every worker begins with the unit that has its index and draws further indices from a counter
// that all workers share. Units in flight stay neighbours however long each takes; static rounds drift apart.
//
//   Counter   next(): how many indices were drawn before
template <class T, class Counter>
class DynamicScheduler {
 public:
  using Args = typename T::Args;

  MOE_DEVICE DynamicScheduler(const Args& p, const GroupOffsets& groups, int worker, int workers,
                              const Counter& counter)
      : cursor_(groups), counter_(counter), units_(groups.units_before(p.E)), worker_(worker), workers_(workers) {}

  MOE_DEVICE WorkUnit next() {
    const int index = started_ ? workers_ + counter_.next() : worker_;
    started_ = true;
    return index < units_ ? cursor_.unit(index) : WorkUnit{};
  }

 private:
  GroupCursor cursor_;
  Counter counter_;
  int units_, worker_, workers_;
  bool started_ = false;
};

}  // namespace moe_fp8::gemm
