#include "tokens/tokens_by_rank.h"

#include "numerics/groups.h"
#include "platform/launch.h"

namespace moe_fp8 {
namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 4;  // a multiprocessor: each adds to all counts

MOE_DEVICE int64_t id_at(const TokensByRankParams& p, int64_t i) {
  return p.is_int64 ? static_cast<const int64_t*>(p.ids)[i] : static_cast<const int*>(p.ids)[i];
}

MOE_DEVICE int slots_of(const TokensByRankParams& p, int64_t token, int rank) {
  const uint64_t first = uint64_t(rank) * p.L;
  int slots = 0;
  for (int64_t j = 0; j < p.top_k; ++j)  // below the first, unsigned numbers wrap around
    slots += uint64_t(id_at(p, token * p.row_stride + j)) - first < uint64_t(p.L);
  return slots;
}

// Threads of as many tokens at a time as a block has room for, each with one rank, so that it can count in registers.
// Integers forgive that blocks add up in any order.
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, 1) tokens_by_rank_kernel(MOE_GRID_CONSTANT const TokensByRankParams p) {
  __shared__ int counts[2 * kMaxExperts];
  for (int i = threadIdx.x; i < 2 * p.R; i += kThreads) counts[i] = 0;
  __syncthreads();
  wait_for_previous_kernel();
  const int width = p.R < kThreads ? p.R : kThreads, tokens = kThreads / width, mine = threadIdx.x / width;
  for (int rank = mine < tokens ? threadIdx.x % width : p.R; rank < p.R; rank += width) {
    int rows = 0, slots = 0;
    for (int64_t t = int64_t(blockIdx.x) * tokens + mine; t < p.T; t += int64_t(gridDim.x) * tokens) {
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
  auto* const all = reinterpret_cast<unsigned long long*>(p.counts);
  for (int i = threadIdx.x; i < 2 * p.R; i += kThreads)
    if (counts[i]) atomicAdd(all + i, static_cast<unsigned long long>(counts[i]));
}

}  // namespace

int tokens_by_rank(const TokensByRankParams& p, void* stream) {
  if (const int e = fill_bytes(p.counts, 0, size_t(p.R) * 2 * sizeof(int64_t), stream)) return e;
  const int64_t tokens = p.R < kThreads ? kThreads / p.R : 1;  // of a block at a time
  const int64_t blocks = ceil_div<int64_t>(p.T, tokens), most = kMostBlocks * device().multiprocessors;
  if (blocks == 0) return 0;
  const Launch l = {dim3(unsigned(blocks < most ? blocks : most)), dim3(kThreads), stream};
  return launch(tokens_by_rank_kernel, l, p);
}

}  // namespace moe_fp8
