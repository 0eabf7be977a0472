#include "ops/checks.h"
#include "tokens/sort_tokens.h"
#include "tokens/tokens_by_rank.h"

namespace moe_fp8 {
namespace {

constexpr const char *kSort = "sort_tokens", *kByRank = "tokens_by_rank";

}  // namespace

Results<3> sort_tokens_op(const Tensor& topk_ids, int64_t num_experts) {
  check_range(kSort, "num_experts", num_experts, 1, kMaxExperts);
  validate_ids({kSort, "topk_ids"}, topk_ids, num_experts);
  const bool matrix = topk_ids.dim == 2;
  const int64_t top_k = topk_ids.sizes[topk_ids.dim - 1], N = matrix ? topk_ids.sizes[0] * top_k : top_k;
  const Call call(kSort, "topk_ids", topk_ids);
  Handle permutation = call.empty({N}, kInt32), offs = call.empty({num_experts}, kInt32);
  Handle inverse = call.empty(topk_ids.sizes, topk_ids.dim, kInt32);
  SortTokensParams p = {{topk_ids.data, matrix ? topk_ids.strides[0] : top_k, topk_ids.dtype == kInt64},
                        data<int>(permutation), data<int>(offs), data<int>(inverse), nullptr, N, top_k,
                        int(num_experts)};
  Handle counts;  // scratch of the kernel
  if constexpr (kGpuBuild) {
    if (call.on_gpu()) p.counts = data<int>(counts = call.empty({sort_tokens_blocks(p.N), p.E}, kInt32));
  }
  MOE_FP8_RUN(call, sort_tokens, p);
  return results(permutation, offs, inverse);
}

Results<2> tokens_by_rank_op(const Tensor& topk_ids, int64_t num_experts, int64_t num_ranks) {
  const int64_t T = topk_ids.sizes[0], R = num_ranks;
  check_range(kByRank, "num_ranks", R, 1, kMaxExperts);
  if (T > kMaxRows / R)
    fail(kByRank, ": topk_ids must have at most ", kMaxRows / R, " tokens for ", R, " ranks, got ", T);
  if (num_experts < R || num_experts > R * kMaxExperts || num_experts % R)
    fail(kByRank, ": num_experts must be a multiple of the ", R, " ranks, at most ", R * kMaxExperts, ", got ",
         num_experts);
  validate_ids({kByRank, "topk_ids"}, topk_ids, num_experts);
  const Call call(kByRank, "topk_ids", topk_ids);
  Handle by_rank = call.empty({T, R}, kInt32), counts = call.empty({R, 2}, kInt64);
  const TokensByRankParams p = {{topk_ids.data, topk_ids.strides[0], topk_ids.dtype == kInt64}, data<int>(by_rank),
                                data<int64_t>(counts), T, topk_ids.sizes[1], int(R), int(num_experts / R)};
  MOE_FP8_RUN(call, tokens_by_rank, p);
  return results(by_rank, counts);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(sort_tokens)
MOE_FP8_REGISTER(tokens_by_rank)
