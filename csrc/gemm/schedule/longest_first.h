// Longest-processing-time-first scheduling of K-grouped products: the cost of a unit grows with the size of its group.
#pragma once
#include "gemm/schedule/work_units.h"

namespace moe_fp8::gemm {

// Groups come by falling size, and each of their units goes to the worker that is free first, by the units' costs. One
// warp simulates this for all workers, in batches of groups with about the same cost. Integer arithmetic makes every
// block find the same schedule. docs/kernels/gemm.md compares it with static rounds.
//
//   T::kStoreCost   cost of storing a tile, in steps of kOffsAlign elements of K
template <class T>
class LongestFirstScheduler {
 public:
  using Args = typename T::Args;
  static constexpr int kMaxWorkers = 96;

  MOE_DEVICE LongestFirstScheduler(const Args& p, const GroupOffsets& groups, int worker, int workers)
      : groups_(groups), E_(p.E), units_per_group_(typename T::Units(p, p.M).count()), worker_(worker),
        workers_(workers) {
    const int units = E_ * units_per_group_;
    scheduled_ = Min{}(workers, units);  // the first batch: one unit for each worker
    assigned_ = worker < scheduled_;
    if (units == 0) return;
    // units_started() divides exactly while its dividend times its divisor is below 2^32. Coarser costs ensure that.
    for (uint64_t max = unit_cost(0); max * max * (ceil_div(units, workers) + 2) >> 31; max /= 2) ++shift_;
#pragma unroll
    for (int i = 0; i < kWorkersPerLane; ++i)
      free_at_[i] = worker_of(i) < scheduled_ ? unit_cost(worker_of(i) / units_per_group_)
                    : worker_of(i) < workers  ? 0
                                              : kNever;
  }

  // Called by all lanes of a warp, like every function below.
  MOE_DEVICE WorkUnit next() {
    while (returned_ == assigned_) {
      if (scheduled_ == E_ * units_per_group_) return {};
      schedule_batch();
    }
    const int index = cost_ ? batch_begin_ + index_in_batch(returned_) : worker_;
    ++returned_;
    return {groups_.by_size[index / units_per_group_], index % units_per_group_};
  }

 private:
  static constexpr int kWorkersPerLane = ceil_div(kMaxWorkers, kWarpSize), kNever = INT32_MAX;

  static MOE_DEVICE int lane() { return threadIdx.x % kWarpSize; }
  static MOE_DEVICE int worker_of(int i) { return lane() + i * kWarpSize; }
  // Costs keep five bits, so that groups of about the same cost form one batch. A cost of 1 would have no reciprocal.
  MOE_DEVICE int unit_cost(int rank_by_size) const {
    const int steps = groups_.size(groups_.by_size[rank_by_size]) / T::kOffsAlign;
    int cost = Max{}((steps + T::kStoreCost) >> shift_, 2), step = 1;
    while (cost >> 5 >= step) step *= 2;
    return (cost + step / 2) & -step;
  }
  // How many units of the batch a worker that is free at `free_at` starts before `time`.
  MOE_DEVICE int units_started(int time, int free_at) const {
    return time > free_at ? int(uint64_t(time - free_at + cost_ - 1) * reciprocal_ >> 32) : 0;
  }
  MOE_DEVICE int units_started_by_all(int time) const {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kWorkersPerLane; ++i) count += units_started(time, free_at_[i]);
    return wave_sum(count);
  }
  // Schedules the next groups with the same cost. Each unit goes to the worker that can start it first, and to the
  // lowest of workers that tie.
  MOE_DEVICE void schedule_batch() {
    int first_free = kNever, last_free = 0;
#pragma unroll
    for (int i = 0; i < kWorkersPerLane; ++i) {
      free_at_[i] += count_[i] * cost_;
      first_free = Min{}(first_free, free_at_[i]);
      if (free_at_[i] < kNever) last_free = Max{}(last_free, free_at_[i]);
    }
    first_free = int(~wave_max(~uint32_t(first_free)));
#pragma unroll
    for (int i = 0; i < kWorkersPerLane; ++i)
      if (free_at_[i] < kNever) free_at_[i] -= first_free;

    int group_end = scheduled_ / units_per_group_;
    cost_ = unit_cost(group_end);
    reciprocal_ = UINT32_MAX / uint32_t(cost_) + 1;
    for (LaneMask others = 0; !others; group_end += others ? popcount((others & -others) - 1) : kWarpSize)
      others = ballot(group_end + lane() >= E_ || unit_cost(group_end + lane()) != cost_);
    batch_begin_ = scheduled_;
    scheduled_ = group_end * units_per_group_;
    const int units = scheduled_ - batch_begin_;

    // The last unit of the batch starts at a time in [low, high).
    int low = 0, high = int(wave_max(uint32_t(last_free))) - first_free + ceil_div(units, workers_) * cost_;
    while (high - low > 1) {
      const int mid = (low + high) / 2;
      if (units_started_by_all(mid) < units) low = mid;
      else high = mid;
    }
    int remaining = units - units_started_by_all(low), worker_free_at = 0, worker_count = 0;
#pragma unroll
    for (int i = 0; i < kWorkersPerLane; ++i) {
      count_[i] = units_started(low, free_at_[i]);
      const LaneMask starts_at_low = ballot(units_started(high, free_at_[i]) > count_[i]);
      const LaneMask lane_bit = LaneMask(1) << lane();
      if (starts_at_low & lane_bit && popcount(starts_at_low & (lane_bit - 1)) < remaining) ++count_[i];
      remaining -= popcount(starts_at_low);
      worker_free_at += worker_of(i) == worker_ ? free_at_[i] : 0;
      worker_count += worker_of(i) == worker_ ? count_[i] : 0;
    }
    worker_free_at_ = wave_sum(worker_free_at);
    assigned_ = wave_sum(worker_count);
    returned_ = 0;
  }
  // Units of a batch are numbered in the order in which they start, so that units in flight are neighbours. Returns the
  // number of this worker's unit i.
  MOE_DEVICE int index_in_batch(int i) const {
    const int time = worker_free_at_ + i * cost_;
    int count = 0;
#pragma unroll
    for (int j = 0; j < kWorkersPerLane; ++j)
      count += units_started(time + (worker_of(j) < worker_), free_at_[j]);
    return wave_sum(count);
  }

  const GroupOffsets& groups_;
  int E_, units_per_group_;
  int worker_, workers_, shift_ = 0;
  int scheduled_, batch_begin_ = 0;      // units up to the end of the batch, and before it
  int assigned_, returned_ = 0;          // units of this worker in the batch: all, and returned by next() so far
  int worker_free_at_ = 0, cost_ = 0;    // when this worker starts the batch; cost of each of its units
  uint32_t reciprocal_ = 0;              // of cost_
  int free_at_[kWorkersPerLane] = {};    // per worker: when it has finished all batches before
  int count_[kWorkersPerLane] = {};      // per worker: its units of the batch
};

}  // namespace moe_fp8::gemm
