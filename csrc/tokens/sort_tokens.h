// Sorts the slots of a router's choice by expert.
//
// permutation [N]: the slots of expert 0 in rising order, then the slots of expert 1, ...; -1 behind the last of them
// offs [E]:        the exclusive end of every expert's slots in permutation
// inverse [N]:     the place of every slot in permutation; -1 if its id is not in [0, E): a dropped slot
//
// Slot s is element (s / top_k, s % top_k) of ids; rows of ids are row_stride elements apart. E is at most kMaxExperts.
#pragma once
#include <cstdint>

#include "platform/compiler.h"

namespace moe_fp8 {

struct SortTokensParams {
  const void* ids;  // int32, or int64
  int* permutation;
  int* offs;
  int* inverse;
  int* counts;      // scratch: [sort_tokens_blocks(N), E]
  int64_t N, top_k, row_stride;
  int E;
  bool is_int64;
};

template <class Id>
MOE_HD int expert_of(Id id, int64_t E) { return id >= 0 && id < E ? int(id) : -1; }  // -1: no expert

// Blocks that share N slots on the current device.
int64_t sort_tokens_blocks(int64_t N);

int sort_tokens(const SortTokensParams& p, void* stream);
void sort_tokens_cpu(const SortTokensParams& p);

}  // namespace moe_fp8
