#include "tokens/sort_tokens.h"

#include "cpu/tokens.h"
#include "ops/checks.h"

namespace moe_fp8 {
namespace {

constexpr const char *kSort = "sort_tokens", *kByRank = "tokens_by_rank";

void run(const Call& call, const Tensor& ids, SortTokensParams& p) {
#if defined(MOE_FP8_GPU)
  if (ids.on_gpu()) {
    Handle counts = call.empty({sort_tokens_blocks(p.N), p.E}, kInt32);
    p.counts = data<int>(counts);
    return call.check(sort_tokens(p, call.stream()));
  }
#endif
  sort_tokens_cpu(p);
}

void run(const Call& call, const Tensor& ids, const TokensByRankParams& p) {
#if defined(MOE_FP8_GPU)
  if (ids.on_gpu()) return call.check(tokens_by_rank(p, call.stream()));
#endif
  tokens_by_rank_cpu(p);
}

}  // namespace

Results<3> sort_tokens_op(const Tensor& topk_ids, int64_t num_experts) {
  constexpr const Argument& kIds = argument(kSort, "topk_ids");
  check(kIds, topk_ids);
  if (num_experts < 1 || num_experts > kMaxExperts)
    fail(kSort, ": num_experts must be from 1 to ", kMaxExperts, ", got ", num_experts);
  validate_ids(kIds, topk_ids, num_experts);
  SortTokensParams p = {};
  p.is_int64 = topk_ids.dtype == kInt64;
  const bool matrix = topk_ids.dim == 2;
  p.top_k = topk_ids.sizes[topk_ids.dim - 1];
  p.N = matrix ? topk_ids.sizes[0] * p.top_k : p.top_k;
  p.row_stride = matrix ? topk_ids.strides[0] : p.top_k;
  const Call call(kSort, "topk_ids", topk_ids);
  Handle permutation = call.empty({p.N}, kInt32), offs = call.empty({num_experts}, kInt32);
  Handle inverse = call.empty(topk_ids.sizes, topk_ids.dim, kInt32);
  p.ids = topk_ids.data;
  p.permutation = data<int>(permutation);
  p.offs = data<int>(offs);
  p.inverse = data<int>(inverse);
  p.E = int(num_experts);
  run(call, topk_ids, p);
  return results(permutation, offs, inverse);
}

Results<2> tokens_by_rank_op(const Tensor& topk_ids, int64_t num_experts, int64_t num_ranks) {
  constexpr const Argument& kIds = argument(kByRank, "topk_ids");
  check(kIds, topk_ids);
  const int64_t T = topk_ids.sizes[0], R = num_ranks;
  if (R < 1 || R > kMaxExperts) fail(kByRank, ": num_ranks must be from 1 to ", kMaxExperts, ", got ", R);
  if (T > kMaxRows / R)
    fail(kByRank, ": topk_ids must have at most ", kMaxRows / R, " tokens for ", R, " ranks, got ", T);
  if (num_experts < R || num_experts > R * kMaxExperts || num_experts % R)
    fail(kByRank, ": num_experts must be a multiple of the ", R, " ranks, at most ", R * kMaxExperts, ", got ",
         num_experts);
  validate_ids(kIds, topk_ids, num_experts);
  const Call call(kByRank, "topk_ids", topk_ids);
  Handle by_rank = call.empty({T, R}, kInt32), counts = call.empty({R, 2}, kInt64);
  run(call, topk_ids,
      {topk_ids.data, data<int>(by_rank), data<int64_t>(counts), T, topk_ids.sizes[1], topk_ids.strides[0], int(R),
       int(num_experts / R), topk_ids.dtype == kInt64});
  return results(by_rank, counts);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(sort_tokens)
MOE_FP8_REGISTER(tokens_by_rank)
