// Reductions over the threads that share a row, or a column.
//
//   what shares the row            function                                   who gets the result
//   neighbouring lanes             reduce_lanes<kLanes>(v, f)                 all of them
//   lanes kStride apart            reduce_lanes<kLanes, kStride>(v, f)        all of them
//   neighbouring lanes, n rows     reduce_scatter_lanes<kLanes>(rows, f)      kLanes / n of them, for each row
//   several waves                  row_reduce(v, rank, threads, partials, f)  all threads
//   several waves, n rows          reduce_scatter_lanes, then reduce_waves    kLanes / n of each wave, for each row
//
// f is a functor of functional.h, or MaxMagnitude of cast.h. The order in which values are combined is fixed: it
// depends on the template arguments and on the number of waves alone. Lane masks are below kLanes, so rows of 32
// threads stay apart in a wave of 64.
#pragma once
#include <type_traits>

#include "platform/waves.h"
#include "primitives/functional.h"

namespace moe_fp8 {

// Which lanes a butterfly combines first: neighbours (masks 1, 2, 4, ...), or lanes that are kLanes / 2 apart.
enum class LaneOrder { kNearFirst, kFarFirst };

// Combines v over the lanes whose numbers differ in the bits from kStride up to kLanes / 2.
template <int kLanes = kWarpSize, int kStride = 1, LaneOrder kOrder = LaneOrder::kFarFirst, class T, class Combine>
MOE_DEVICE T reduce_lanes(T v, Combine combine) {
  static_assert(std::is_same_v<decltype(combine(v, v)), T>, "the functor would convert the values");
  constexpr bool kWholeWave = kLanes == kWarpSize && kStride == 1;
  if constexpr (kWholeWave && std::is_same_v<Combine, MaxU32>) {
    return wave_max(v);
  } else if constexpr (kWholeWave && std::is_same_v<Combine, Sum>) {
    return wave_sum(v);
  } else {
#pragma unroll
    for (int i = kStride; i < kLanes; i *= 2)
      v = combine(v, shfl_xor(v, kOrder == LaneOrder::kNearFirst ? i : kLanes / 2 * kStride / i));
    return v;
  }
}
// The same over `lanes` neighbouring lanes, a power of two that is known at run time only. Neighbours combine first.
template <class T, class Combine>
MOE_DEVICE T reduce_lanes(T v, int lanes, Combine combine) {
  static_assert(std::is_same_v<decltype(combine(v, v)), T>, "the functor would convert the values");
  for (int mask = 1; mask < lanes; mask *= 2) v = combine(v, shfl_xor(v, mask));
  return v;
}

// Reduce-scatter: every lane brings n values, and gets one of the n results. A step halves what a lane still reduces:
// it keeps one half of its values, and sends the other half to the lane that keeps that one. So n results cost n - 1
// shuffles and log2(kLanes / n) more, instead of n log2(kLanes). n is a power of two, at most kLanes.
//
// Which result a lane gets, of 8 lanes and 4 values:
//
//   lane          0  1  2  3  4  5  6  7
//   kFarFirst     0  0  1  1  2  2  3  3
//   kNearFirst    0  2  1  3  0  2  1  3
template <int kMask, int kLanes, LaneOrder kOrder, class T, int n, class Combine>
MOE_DEVICE T reduce_scatter_step(const T (&values)[n], int lane, Combine combine) {
  constexpr int kHalf = n > 1 ? n / 2 : 1, kNextMask = kOrder == LaneOrder::kNearFirst ? kMask * 2 : kMask / 2;
  T half[kHalf];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const T lower = values[i], upper = values[n - kHalf + i];
    half[i] = combine(lane & kMask ? upper : lower, shfl_xor(lane & kMask ? lower : upper, kMask));
  }
  if constexpr (kNextMask > 0 && kNextMask < kLanes)
    return reduce_scatter_step<kNextMask, kLanes, kOrder>(half, lane, combine);
  else
    return half[0];
}
template <int kLanes, LaneOrder kOrder = LaneOrder::kFarFirst, class T, int n, class Combine>
MOE_DEVICE T reduce_scatter_lanes(const T (&values)[n], int lane, Combine combine) {
  static_assert(kLanes > 1 && n <= kLanes && (n & (n - 1)) == 0);
  static_assert(std::is_same_v<decltype(combine(values[0], values[0])), T>, "the functor would convert the values");
  return reduce_scatter_step<kOrder == LaneOrder::kNearFirst ? 1 : kLanes / 2, kLanes, kOrder>(values, lane, combine);
}

// Reduce-scatter of sums, neighbours first. Lane l gets the sum of value reduce_scatter_sum_index<n>(l).
template <int kLanes = kWarpSize, int n>
MOE_DEVICE float reduce_scatter_sum(const float (&values)[n]) {
  return reduce_scatter_lanes<kLanes, LaneOrder::kNearFirst>(values, threadIdx.x, SumF32{});
}
template <int n>
MOE_DEVICE int reduce_scatter_sum_index(int lane) {
  int index = 0;
#pragma unroll
  for (int bit = 1; bit < n; bit *= 2) index = 2 * index + lane / bit % 2;
  return index;
}

// Combines the results of a row's waves: v of the lane with the same number. The lanes with `writes` store it to
// partials[wave * kStride], in shared memory, which must be free: a slow wave may still read the previous row's values,
// so callers with several rows alternate two buffers or place a barrier. Called by the whole block.
template <int kStride = 1, class T, class Combine>
MOE_DEVICE T reduce_waves(T v, bool writes, T* partials, int wave, int waves, Combine combine) {
  if (waves == 1) return v;
  if (writes) partials[wave * kStride] = v;
  __syncthreads();
  v = partials[0];
  for (int i = 1; i < waves; ++i) v = combine(v, partials[i * kStride]);
  return v;
}

// Combines v over the `threads` threads of a row, whole waves of the block, of which the caller is number `rank`.
// partials: a value of shared memory for each of their waves, see reduce_waves(). Called by the whole block.
template <class T, class Combine>
MOE_DEVICE T row_reduce(T v, int rank, int threads, T* partials, Combine combine) {
  v = reduce_lanes(v, combine);
  return reduce_waves(v, rank % kWarpSize == 0, partials, rank / kWarpSize, threads / kWarpSize, combine);
}

}  // namespace moe_fp8
