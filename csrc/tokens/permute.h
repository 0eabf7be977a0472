// permute_indices: where tokens that every rank sent for every local expert go, so that each expert's lie together.
//
// counts [R, E], int32 or int64, in the order in which the M tokens lie: rank by rank, each rank's expert by expert.
//   end(r, e)    = min(M, sum of the counts up to (r, e)), negative counts taken as 0;  size(r, e) from end to end
//   tokens_per_expert[e] = sum_r size(r, e)
//   padded_offs[e]       = padded_offs[e-1] + round_up(tokens_per_expert[e], align), of an empty one `empty`
//   indices[padded_offs[e-1] + sum_{r' < r} size(r', e) + i] = row i of those of (r, e);  every other entry is -1
#pragma once
#include "numerics/groups.h"

namespace moe_fp8 {

constexpr int kMaxCounts = 4096;  // R * E: what shared memory holds

struct PermuteIndicesParams {
  const void* counts;
  bool counts_int64;
  int* indices;            // [P]
  int* padded_offs;        // [E]
  int* tokens_per_expert;  // [E]
  int64_t R, E, M, P;
  int align, empty;        // empty: 0 or align

  MOE_HD int count(int64_t i) const {
    const int64_t n = counts_int64 ? static_cast<const int64_t*>(counts)[i] : static_cast<const int*>(counts)[i];
    return n < 0 ? 0 : n > M ? int(M) : int(n);
  }
};

// 0, or the runtime's error code.
int permute_indices(const PermuteIndicesParams& p, void* stream);

}  // namespace moe_fp8
