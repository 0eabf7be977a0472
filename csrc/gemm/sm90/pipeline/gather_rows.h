// Sums that stay in the tensor cores for a whole tile, stage after stage.
#pragma once
#include "gemm/sm90/pipeline/consumer.h"

namespace moe_fp8::sm90 {

// A round, or half of one, of whose stages kLive are loaded. One stage's products are under way while the next one is
// waited for; `begun`: there was a round before, whose last stage is held. kLast: it is the last of a tile.
template <int kLive, bool kLast, int kFirst = 0, int kEnd = kStages, class T, int n>
MOE_DEVICE void multiply_round(Consumer<T>& c, float (&sum)[n], bool begun, int depth) {
#pragma unroll
  for (int s = kFirst; s < kEnd; ++s) {
    c.wait_full(s);
    if (s < kFirst + kLive) {
      const bool accumulate = begun || s > kFirst, last = kLast && s == kFirst + kLive - 1;
      if (T::kSumGroups && last && depth % kDepth > 0) c.multiply_rest(sum, s, 0, accumulate, depth % kDepth);
      else c.multiply(sum, s, 0, accumulate);
      wgmma_wait<1>();
      if (s > kFirst) c.release_stage(s - 1);
      else if (begun) c.release_stage(kStages - 1);
    } else {
      if (s == kFirst + kLive) {
        wgmma_wait<0>();
        c.release_stage(s - 1);
      }
      c.release_stage(s);
    }
  }
  if (kEnd == kStages) c.phase ^= 1;
}
// The last one: it ends when all products are there, and holds no stage.
template <int kLive, int kFirst = 0, int kEnd = kStages, class T, int n>
MOE_DEVICE void multiply_last(Consumer<T>& c, float (&sum)[n], bool begun, int depth) {
  multiply_round<kLive, true, kFirst, kEnd>(c, sum, begun, depth);
  if constexpr (kLive == kEnd - kFirst) {
    wgmma_wait<0>();
    c.release_stage(kEnd - 1);
  }
}
template <int kFirst, class T, int n>
MOE_DEVICE void multiply_half(Consumer<T>& c, const Tile& tile, float (&sum)[n]) {
  static_assert(kHalf == 2);
  if (steps_of<T>(tile) == 2) multiply_last<2, kFirst, kFirst + kHalf>(c, sum, false, tile.depth);
  else multiply_last<1, kFirst, kFirst + kHalf>(c, sum, false, tile.depth);
  pin_registers(sum);
}
template <class T, int n>
MOE_DEVICE void multiply_rows(Consumer<T>& c, const Tile& tile, int turn, float (&sum)[n]) {
  if (by_halves<T>(c.p)) return turn % 2 ? multiply_half<kHalf>(c, tile, sum) : multiply_half<0>(c, tile, sum);
  const int steps = steps_of<T>(tile);
  int left = steps;
#pragma unroll 1
  for (; left > kStages; left -= kStages) multiply_round<kStages, false>(c, sum, left < steps, tile.depth);
  const bool begun = left < steps;
  static_assert(kStages == 4);
  if (left == 4) multiply_last<4>(c, sum, begun, tile.depth);
  else if (left == 3) multiply_last<3>(c, sum, begun, tile.depth);
  else if (left == 2) multiply_last<2>(c, sum, begun, tile.depth);
  else multiply_last<1>(c, sum, begun, tile.depth);
  pin_registers(sum);
}

}  // namespace moe_fp8::sm90
