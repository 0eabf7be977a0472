// How units of work are dealt to workers: which one is next, of which group and which of the group's.
//
// Traits T as in schedule.h.
#pragma once
#include "numerics/groups.h"
#include "numerics/operand_scales.h"
#include "platform/waves.h"
#include "primitives/groups.h"

namespace moe_fp8::gemm {

// In shared memory.
struct GroupBounds {
  int end[kMaxExperts + 1];     // group e has [end[e], end[e + 1]) of what is grouped
  int before[kMaxExperts + 1];  // group e: units, of groups of rows; blocks of kGroupScales, of those of the sum
  uint16_t by_size[kMaxExperts];  // of the sum: the groups, largest first

  // By the whole block; ends with a barrier. offs may hold anything.
  template <class T>
  MOE_DEVICE void build(const int* offs, const typename T::Args& p) {
    const int threads = blockDim.x, t = threadIdx.x, E = p.E, extent = T::of_sum(p) ? p.K : p.M;
    if (t == 0) end[0] = before[0] = 0;
    for (int e = t; e < E; e += threads) {
      const int at = clamp_offset(offs[e], extent);
      end[e + 1] = T::of_sum(p) ? at / T::kSumAlign * T::kSumAlign : at;
    }
    __syncthreads();
    block_scan(end + 1, E, Max{});
    for (int e = t; e < E; e += threads) {
      const int size = end[e + 1] - end[e];
      before[e + 1] = T::of_sum(p) ? ceil_div(size, kGroupScales) : typename T::Units(p, size).count();
      if (!T::of_sum(p)) continue;
      int larger = 0;
      for (int other = 0; other < E; ++other) {
        const int of_other = end[other + 1] - end[other];
        larger += of_other > size || (of_other == size && other < e);
      }
      by_size[larger] = uint16_t(e);
    }
    __syncthreads();
    block_scan(before + 1, E, Sum{});
  }
};

struct Unit { int expert = -1, number = 0; };  // -1: none is left

// Of groups of rows: the units by their number in all of them, which only rises.
class UnitsOfRows {
 public:
  MOE_DEVICE explicit UnitsOfRows(const GroupBounds& groups) : groups_(groups) {}
  MOE_DEVICE Unit at(int number) {  // which there is
    while (number >= groups_.before[expert_ + 1]) ++expert_;
    return {expert_, number - groups_.before[expert_]};
  }

 private:
  const GroupBounds& groups_;
  int expert_ = 0;
};

// Every worker takes one unit of a round, forwards in one and backwards in the next, so that no unit waits for another.
// Groups of the sum come by size, for that is what their units cost: rounds of like units end together.
template <class T>
class InRounds {
 public:
  using Args = typename T::Args;
  static constexpr int kMostWorkers = INT32_MAX;

  MOE_DEVICE InRounds(const Args& p, const GroupBounds& groups, int worker, int workers)
      : p_(p), groups_(groups), worker_(worker), workers_(workers), of_rows_(groups) {}

  MOE_DEVICE Unit next() {
    const int unit = round_ * workers_ + (round_ % 2 ? workers_ - 1 - worker_ : worker_);
    if (unit >= (T::of_sum(p_) ? p_.E * of_group() : groups_.before[p_.E])) return {};
    ++round_;
    if (T::of_sum(p_)) {
      const int at = unit / of_group();
      return {groups_.by_size[at], unit - at * of_group()};
    }
    return of_rows_.at(unit);
  }

 private:
  MOE_DEVICE int of_group() const { return typename T::Units(p_, p_.M).count(); }  // of the sum

  const Args& p_;
  const GroupBounds& groups_;
  int worker_, workers_, round_ = 0;
  UnitsOfRows of_rows_;
};

// Of groups of rows: every worker begins with the unit of its own number, and draws the numbers behind those from a
// counter that all share. So units under way are neighbours, however long each takes, where rounds drift apart.
//
//   Counter   next(): how many numbers were drawn before
template <class T, class Counter>
class ByCounter {
 public:
  using Args = typename T::Args;

  MOE_DEVICE ByCounter(const Args& p, const GroupBounds& groups, int worker, int workers, const Counter& counter)
      : of_rows_(groups), counter_(counter), all_(groups.before[p.E]), worker_(worker), workers_(workers) {}

  MOE_DEVICE Unit next() {
    const int number = begun_ ? workers_ + counter_.next() : worker_;
    begun_ = true;
    return number < all_ ? of_rows_.at(number) : Unit{};
  }

 private:
  UnitsOfRows of_rows_;
  Counter counter_;
  int all_, worker_, workers_;
  bool begun_ = false;
};

// Of groups of the sum: they come by size, and each of their units goes to the worker that is done first, by what units
// cost. A wave works that out for all workers, at most kMostWorkers, and at once for groups of about the same cost; in
// integers, so that every block finds the same. Gradients of [65536, 512, 1536] on an H200, for 40 experts of sizes as
// 1 / rank: 107 us, in rounds 153.
//
//   T::kStoreCost   of a tile, what storing it takes, in steps of kSumAlign elements of the sum
template <class T>
class ByCost {
 public:
  using Args = typename T::Args;
  static constexpr int kMostWorkers = 96;

  MOE_DEVICE ByCost(const Args& p, const GroupBounds& groups, int worker, int workers)
      : groups_(groups), E_(p.E), of_group_(typename T::Units(p, p.M).count()), worker_(worker), workers_(workers) {
    const int all = E_ * of_group_;  // units
    dealt_ = Min{}(workers, all);  // the first, one for each worker
    own_ = worker < dealt_;
    if (all == 0) return;
    // So coarse that what begun() divides, times what it divides by, stays below 2^32: until then it is exact.
    for (uint64_t most = cost_of(0); most * most * (ceil_div(all, workers) + 2) >> 31; most /= 2) ++shift_;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i)
      load_[i] = worker_of(i) < dealt_ ? cost_of(worker_of(i) / of_group_) : worker_of(i) < workers ? 0 : kNever;
  }

  // By all lanes of a wave, as all that follows.
  MOE_DEVICE Unit next() {
    while (given_ == own_) {
      if (dealt_ == E_ * of_group_) return {};
      deal();
    }
    const int unit = cost_ ? first_ + number(given_) : worker_;
    ++given_;
    return {groups_.by_size[unit / of_group_], unit % of_group_};
  }

 private:
  static constexpr int kOfLane = ceil_div(kMostWorkers, kWarpSize), kNever = INT32_MAX;

  static MOE_DEVICE int lane() { return threadIdx.x % kWarpSize; }
  static MOE_DEVICE int worker_of(int i) { return lane() + i * kWarpSize; }
  // Of a unit of the group, to five bits: groups of about the same cost are dealt at once. 1 would have no reciprocal.
  MOE_DEVICE int cost_of(int group) const {
    const int e = groups_.by_size[group], steps = (groups_.end[e + 1] - groups_.end[e]) / T::kSumAlign;
    int cost = Max{}((steps + T::kStoreCost) >> shift_, 2), step = 1;
    while (cost >> 5 >= step) step *= 2;
    return (cost + step / 2) & -step;
  }
  // How many units of cost_ a worker who is done at `load` begins before `time`.
  MOE_DEVICE int begun(int time, int load) const {
    return time > load ? int(uint64_t(time - load + cost_ - 1) * inverse_ >> 32) : 0;
  }
  MOE_DEVICE int begun_by_all(int time) const {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) count += begun(time, load_[i]);
    return wave_sum(count);
  }
  // Deals the next groups that cost the same. Each unit goes to the worker that can begin it first, of equals to the
  // lowest.
  MOE_DEVICE void deal() {
    int first = kNever, last = 0;  // who is done
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      load_[i] += count_[i] * cost_;
      first = Min{}(first, load_[i]);
      if (load_[i] < kNever) last = Max{}(last, load_[i]);
    }
    first = int(~warp_max(~uint32_t(first)));
#pragma unroll
    for (int i = 0; i < kOfLane; ++i)
      if (load_[i] < kNever) load_[i] -= first;

    int end = dealt_ / of_group_;  // of the groups
    cost_ = cost_of(end);
    inverse_ = UINT32_MAX / uint32_t(cost_) + 1;
    for (LaneMask others = 0; !others; end += others ? popcount((others & -others) - 1) : kWarpSize)
      others = ballot(end + lane() >= E_ || cost_of(end + lane()) != cost_);
    first_ = dealt_;
    dealt_ = end * of_group_;
    const int units = dealt_ - first_;

    int before = 0, behind = int(warp_max(uint32_t(last))) - first + ceil_div(units, workers_) * cost_;
    while (behind - before > 1) {  // the last one begins in between
      const int between = (before + behind) / 2;
      if (begun_by_all(between) < units) before = between;
      else behind = between;
    }
    int left = units - begun_by_all(before), own_load = 0, own = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      count_[i] = begun(before, load_[i]);
      const LaneMask begin = ballot(begun(behind, load_[i]) > count_[i]), own_bit = LaneMask(1) << lane();
      if (begin & own_bit && popcount(begin & (own_bit - 1)) < left) ++count_[i];
      left -= popcount(begin);
      own_load += worker_of(i) == worker_ ? load_[i] : 0;
      own += worker_of(i) == worker_ ? count_[i] : 0;
    }
    own_load_ = wave_sum(own_load);
    own_ = wave_sum(own);
    given_ = 0;
  }
  // Of the worker's unit i of those, in the order in which they begin: neighbours are read at about the same time.
  MOE_DEVICE int number(int i) const {
    const int time = own_load_ + i * cost_;
    int count = 0;
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) count += begun(time + (worker_of(j) < worker_), load_[j]);
    return wave_sum(count);
  }

  const GroupBounds& groups_;
  int E_, of_group_;  // groups, and units of each
  int worker_, workers_, shift_ = 0;
  int dealt_, first_ = 0;  // units so far, and before those that are dealt at once
  int own_, given_ = 0, own_load_ = 0, cost_ = 0;
  uint32_t inverse_ = 0;  // of cost_
  int load_[kOfLane] = {}, count_[kOfLane] = {};  // of workers: when they are done before, and how many they take
};

}  // namespace moe_fp8::gemm
