// Sums that stay in the tensor cores for a whole tile, stage after stage.
#pragma once
#include "gemm/sm90/consumer.h"

namespace moe_fp8::sm90 {

// A round, or half of one, of whose stages kLive are loaded. One stage's products are under way while the next one is
// waited for; `begun`: there was a round before, whose last stage is `held`.
template <int kLive, int kFirst = 0, int kEnd = kStages, class T, int n>
MOE_DEVICE void multiply_round(Consumer<T>& c, float (&sum)[n], bool begun, bool held) {
#pragma unroll
  for (int s = kFirst; s < kEnd; ++s) {
    c.wait_full(s);
    if (s < kFirst + kLive) {
      c.multiply(sum, s, 0, begun || s > kFirst);
      wgmma_wait<1>();
      if (s > kFirst) c.release_stage(s - 1);
      else if (held) c.release_stage(kStages - 1);
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
// The last of a tile: it ends when all products are there, and holds no stage.
template <int kLive, int kFirst = 0, int kEnd = kStages, class T, int n>
MOE_DEVICE void multiply_last(Consumer<T>& c, float (&sum)[n], bool begun, bool held) {
  multiply_round<kLive, kFirst, kEnd>(c, sum, begun, held);
  if constexpr (kLive == kEnd - kFirst) {
    wgmma_wait<0>();
    c.release_stage(kEnd - 1);
  }
}
template <int kFirst, class T, int n>
MOE_DEVICE void multiply_half(Consumer<T>& c, int steps, float (&sum)[n]) {
  static_assert(kHalf == 2);
  if (steps == 2) multiply_last<2, kFirst, kFirst + kHalf>(c, sum, false, false);
  else multiply_last<1, kFirst, kFirst + kHalf>(c, sum, false, false);
  pin_registers(sum);
}
template <class T, int n>
MOE_DEVICE void multiply_rows(Consumer<T>& c, Shared<T>& shared, const Tile& tile, int turn, float (&sum)[n]) {
  const int steps = steps_of(tile);
  if (by_halves<T>(c.p)) return turn % 2 ? multiply_half<kHalf>(c, steps, sum) : multiply_half<0>(c, steps, sum);
  int left = steps;
#pragma unroll 1
  for (; left > kStages; left -= kStages) multiply_round<kStages>(c, sum, left < steps, left < steps);
  const bool begun = left < steps, held = begun && !T::kSumGroups;
  if (T::kSumGroups) {  // holding a stage while waiting for the last one, which may be loaded into it, would never end
    wgmma_wait<0>();
    if (begun) c.release_stage(kStages - 1);
    clear_rest(c, shared, tile.depth);
  }
  static_assert(kStages == 4);
  if (left == 4) multiply_last<4>(c, sum, begun, held);
  else if (left == 3) multiply_last<3>(c, sum, begun, held);
  else if (left == 2) multiply_last<2>(c, sum, begun, held);
  else multiply_last<1>(c, sum, begun, held);
  pin_registers(sum);
}

}  // namespace moe_fp8::sm90
