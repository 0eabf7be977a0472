// The main loop of fast sums: the tensor cores accumulate all of K.
#pragma once
#include "gemm/sm90/pipeline/consumer.h"

namespace moe_fp8::sm90 {

// One pass over the stages [kFirst, kEnd). The first kLoaded hold data, the others are padding. Products of one stage
// are in flight while the thread waits for the next. `continues`: the tile had a pass before this one, and that pass
// has not released its last stage. kLast: this is the tile's last pass.
template <int kLoaded, bool kLast, int kFirst = 0, int kEnd = kStages, class T, int n>
MOE_DEVICE void multiply_pass(Consumer<T>& c, float (&sum)[n], bool continues, int k_size) {
#pragma unroll
  for (int s = kFirst; s < kEnd; ++s) {
    c.wait_stage(s);
    if (s < kFirst + kLoaded) {
      const bool accumulate = continues || s > kFirst, last = kLast && s == kFirst + kLoaded - 1;
      if (T::kKGrouped && last && k_size % kTileK > 0) c.multiply_k_tail(sum, s, 0, accumulate, k_size % kTileK);
      else c.multiply(sum, s, 0, accumulate);
      wgmma_wait<1>();
      if (s > kFirst) c.release_stage(s - 1);
      else if (continues) c.release_stage(kStages - 1);
    } else {
      if (s == kFirst + kLoaded) {
        wgmma_wait<0>();
        c.release_stage(s - 1);
      }
      c.release_stage(s);
    }
  }
  if (kEnd == kStages) c.phase ^= 1;
}
// The last pass returns when all products are complete, and leaves no stage unreleased.
template <int kLoaded, int kFirst = 0, int kEnd = kStages, class T, int n>
MOE_DEVICE void multiply_last_pass(Consumer<T>& c, float (&sum)[n], bool continues, int k_size) {
  multiply_pass<kLoaded, true, kFirst, kEnd>(c, sum, continues, k_size);
  if constexpr (kLoaded == kEnd - kFirst) {
    wgmma_wait<0>();
    c.release_stage(kEnd - 1);
  }
}
// The split pipeline: all of K is in the stages from kFirst on.
template <int kFirst, class T, int n>
MOE_DEVICE void multiply_split(Consumer<T>& c, const Tile& tile, float (&sum)[n]) {
  static_assert(kSplitStages == 2);
  if (k_tiles<T>(tile) == 2) multiply_last_pass<2, kFirst, kFirst + kSplitStages>(c, sum, false, tile.k_size);
  else multiply_last_pass<1, kFirst, kFirst + kSplitStages>(c, sum, false, tile.k_size);
  pin_registers(sum);
}
template <class T, int n>
MOE_DEVICE void multiply_fast(Consumer<T>& c, const Tile& tile, int slot, float (&sum)[n]) {
  if (splits_pipeline<T>(c.p))
    return slot % 2 ? multiply_split<kSplitStages>(c, tile, sum) : multiply_split<0>(c, tile, sum);
  const int stages = k_tiles<T>(tile);
  int left = stages;
#pragma unroll 1
  for (; left > kStages; left -= kStages) multiply_pass<kStages, false>(c, sum, left < stages, tile.k_size);
  const bool continues = left < stages;
  static_assert(kStages == 4);
  if (left == 4) multiply_last_pass<4>(c, sum, continues, tile.k_size);
  else if (left == 3) multiply_last_pass<3>(c, sum, continues, tile.k_size);
  else if (left == 2) multiply_last_pass<2>(c, sum, continues, tile.k_size);
  else multiply_last_pass<1>(c, sum, continues, tile.k_size);
  pin_registers(sum);
}

}  // namespace moe_fp8::sm90
