#include "tokens/tokens_by_rank.h"

#include "numerics/groups.h"
#include "platform/launch.h"
#include "tokens/policy.h"

namespace moe_fp8 {
namespace {

MOE_DEVICE int slots_of(const TokensByRankParams& p, int64_t token, int rank) {
  const uint64_t first = uint64_t(rank) * p.L;
  int slots = 0;
  for (int64_t j = 0; j < p.top_k; ++j)  // an id below `first` wraps around, and is too large
    slots += uint64_t(p.ids.at(token, j)) - first < uint64_t(p.L);
  return slots;
}

// A thread has one rank, so that it counts in registers. A block takes as many tokens at once as it has threads for, R
// threads each. Blocks add up in any order: integer sums are the same.
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kTokensByRankThreads, 1)
    tokens_by_rank_kernel(MOE_GRID_CONSTANT const TokensByRankParams p) {
  __shared__ int counts[2 * kMaxExperts];
  for (int i = threadIdx.x; i < 2 * p.R; i += kTokensByRankThreads) counts[i] = 0;
  __syncthreads();
  wait_for_previous_kernel();
  const int width = p.R < kTokensByRankThreads ? p.R : kTokensByRankThreads, tokens = kTokensByRankThreads / width;
  const int token = threadIdx.x / width;
  for (int rank = token < tokens ? threadIdx.x % width : p.R; rank < p.R; rank += width) {
    int rows = 0, slots = 0;
    for (int64_t t = int64_t(blockIdx.x) * tokens + token; t < p.T; t += int64_t(gridDim.x) * tokens) {
      const int n = slots_of(p, t, rank);
      p.by_rank[t * p.R + rank] = n ? rank : -1;
      rows += n > 0;
      slots += n;
    }
    if (rows) {
      atomicAdd(counts + 2 * rank, rows);
      atomicAdd(counts + 2 * rank + 1, slots);
    }
  }
  __syncthreads();
  auto* const global_counts = reinterpret_cast<unsigned long long*>(p.counts);
  for (int i = threadIdx.x; i < 2 * p.R; i += kTokensByRankThreads)
    if (counts[i]) atomicAdd(global_counts + i, static_cast<unsigned long long>(counts[i]));
}

}  // namespace

int tokens_by_rank(const TokensByRankParams& p, void* stream) {
  if (const int e = fill_bytes(p.counts, 0, size_t(p.R) * 2 * sizeof(int64_t), stream)) return e;
  const int64_t tokens = p.R < kTokensByRankThreads ? kTokensByRankThreads / p.R : 1;  // of a block at a time
  const int64_t blocks = ceil_div<int64_t>(p.T, tokens);
  const int64_t max_blocks = kTokensByRankBlocks * device().multiprocessors;
  if (blocks == 0) return 0;
  const Launch l = {dim3(unsigned(blocks < max_blocks ? blocks : max_blocks)), dim3(kTokensByRankThreads), stream};
  return launch(tokens_by_rank_kernel, l, p);
}

}  // namespace moe_fp8
