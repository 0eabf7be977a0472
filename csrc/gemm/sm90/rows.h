// Sums that stay in the tensor cores for a whole tile, stage after stage.
#pragma once
#include "gemm/sm90/consumer.h"

namespace moe_fp8::sm90 {

// A round, of whose stages kLive are loaded. One stage's products are under way while the next one is waited for;
// `begun`: there was a round before, whose last stage is `held`.
template <int kLive, class T, int n>
MOE_DEVICE void multiply_round(Consumer<T>& c, float (&sum)[n], bool begun, bool held) {
#pragma unroll
  for (int s = 0; s < kStages; ++s) {
    c.wait_full(s);
    if (s < kLive) {
      c.multiply(sum, s, 0, begun || s > 0);
      wgmma_wait<1>();
      if (s > 0) c.release_stage(s - 1);
      else if (held) c.release_stage(kStages - 1);
    } else {
      if (s == kLive) {
        wgmma_wait<0>();
        c.release_stage(s - 1);
      }
      c.release_stage(s);
    }
  }
  c.phase ^= 1;
}
template <class T, int n>
MOE_DEVICE void multiply_rows(Consumer<T>& c, Shared<T>& shared, const Tile& tile, float (&sum)[n]) {
  const int steps = steps_of(tile);
  int left = steps;
#pragma unroll 1
  for (; left > kStages; left -= kStages) multiply_round<kStages>(c, sum, left < steps, left < steps);
  const bool begun = left < steps, held = begun && !T::kSumGroups;
  if (T::kSumGroups) {  // holding a stage while waiting for the last one, which may be loaded into it, would never end
    wgmma_wait<0>();
    if (begun) c.release_stage(kStages - 1);
    clear_rest(c, shared, tile.depth);
  }
  if (left == 4) {
    multiply_round<4>(c, sum, begun, held);
    wgmma_wait<0>();
    c.release_stage(kStages - 1);
  } else if (left == 3) {
    multiply_round<3>(c, sum, begun, held);
  } else if (left == 2) {
    multiply_round<2>(c, sum, begun, held);
  } else {
    multiply_round<1>(c, sum, begun, held);
  }
  pin_registers(sum);
}

}  // namespace moe_fp8::sm90
