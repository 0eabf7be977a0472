// The begins and ends of groups, in shared memory: every tile scheduler starts from these offsets.
#pragma once
#include "numerics/groups.h"
#include "numerics/operand_scales.h"
#include "primitives/groups.h"

namespace moe_fp8::gemm {

// Group e owns [offsets[e], offsets[e + 1]) of the grouped dimension: rows of a and out if the product is M-grouped
// (2D x 3D), elements of K if it is K-grouped (2D x 2D). T: the traits of tile_scheduler.h.
struct GroupOffsets {
  int offsets[kMaxExperts + 1];
  int prefix[kMaxExperts + 1];    // M-grouped: work units of the groups before e. K-grouped: their scale blocks
  uint16_t by_size[kMaxExperts];  // K-grouped: groups by falling size, equal ones by index

  MOE_DEVICE int size(int e) const { return offsets[e + 1] - offsets[e]; }
  MOE_DEVICE int units_before(int e) const { return prefix[e]; }
  MOE_DEVICE int scale_blocks_before(int e) const { return prefix[e]; }

  // Called by the whole block; ends with a barrier. offs may hold anything.
  template <class T>
  MOE_DEVICE void build(const int* offs, const typename T::Args& p) {
    const int threads = blockDim.x, t = threadIdx.x, E = p.E, extent = T::k_grouped(p) ? p.K : p.M;
    if (t == 0) offsets[0] = prefix[0] = 0;
    clamp_and_scan_offs(offsets + 1, offs, E, extent, T::k_grouped(p) ? T::kOffsAlign : 1);
    for (int e = t; e < E; e += threads) {
      const int rows_or_k = size(e);
      prefix[e + 1] = T::k_grouped(p) ? ceil_div(rows_or_k, kGroupScales) : typename T::Units(p, rows_or_k).count();
      if (!T::k_grouped(p)) continue;
      int larger = 0;
      for (int other = 0; other < E; ++other) {
        const int other_k = size(other);
        larger += other_k > rows_or_k || (other_k == rows_or_k && other < e);
      }
      by_size[larger] = uint16_t(e);
    }
    __syncthreads();
    block_scan(prefix + 1, E, Sum{});
  }
};

}  // namespace moe_fp8::gemm
