// The ranks that a router's choice sends tokens to. Expert e lives on rank e / L; a rank has L experts.
//
// n(t, r)          = the number of token t's ids [T, top_k] that are in [r L, (r + 1) L)
// by_rank [T, R]:    by_rank[t, r] = r if n(t, r) > 0, else -1: the ids that sort_tokens sorts by rank
// counts [R, 2]:     counts[r] = sum_t (n(t, r) > 0 ? 1 : 0), the rows for rank r, and sum_t n(t, r), their slots
//
// T * top_k and T * R are below 2^31; R is at most kMaxExperts.
#pragma once
#include <cstdint>

#include "tokens/slot_ids.h"

namespace moe_fp8 {

struct TokensByRankParams {
  SlotIds ids;
  int* by_rank;
  int64_t* counts;
  int64_t T, top_k;
  int R, L;
};

int tokens_by_rank(const TokensByRankParams& p, void* stream);
void tokens_by_rank_cpu(const TokensByRankParams& p);

}  // namespace moe_fp8
