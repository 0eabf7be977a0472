// permute_indices: an index that brings together the tokens of each local expert, which lie rank by rank as received.
//
// counts [R, E], int32 or int64, has the order of the M tokens: rank by rank, and within a rank expert by expert.
//   end(r, e)    = min(M, sum of the counts up to (r, e)), negative counts taken as 0
//   size(r, e)   = end(r, e) - the end before it
//   tokens_per_expert[e] = sum_r size(r, e)
//   padded_offs[e]       = padded_offs[e-1] + round_up(tokens_per_expert[e], align), or + `empty` for an empty expert
//   indices[padded_offs[e-1] + sum_{r' < r} size(r', e) + i] = row i of (r, e);  every other entry is -1
#pragma once
#include "numerics/groups.h"

namespace moe_fp8 {

constexpr int kMaxCounts = 4096;  // R * E at most: what shared memory holds

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

int permute_indices(const PermuteIndicesParams& p, void* stream);
void permute_indices_cpu(const PermuteIndicesParams& p);

}  // namespace moe_fp8
