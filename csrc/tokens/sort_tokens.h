// Sorts the slots of a router's choice by expert.
//
// permutation [N]: the slots of expert 0 in rising order, then the slots of expert 1, ...; -1 behind the last of them
// offs [E]:        the exclusive end of every expert's slots in permutation
// inverse [N]:     the place of every slot in permutation; -1 if its id is not in [0, E): a dropped slot
//
// Slot s is element (s / top_k, s % top_k) of ids. E is at most kMaxExperts.
#pragma once
#include <cstdint>

#include "tokens/slot_ids.h"

namespace moe_fp8 {

struct SortTokensParams {
  SlotIds ids;
  int* permutation;
  int* offs;
  int* inverse;
  int* counts;      // scratch: [sort_tokens_blocks(N), E]
  int64_t N, top_k;
  int E;
};

// Blocks that share N slots on the current device.
int64_t sort_tokens_blocks(int64_t N);

int sort_tokens(const SortTokensParams& p, void* stream);
void sort_tokens_cpu(const SortTokensParams& p);

}  // namespace moe_fp8
