#include "tokens/sort_tokens.h"

#include "cpu/tokens.h"
#include "ops/checks.h"

namespace moe_fp8 {
namespace {

constexpr const char* kOp = "sort_tokens";

template <class Id>
void validate_ids(const Tensor& ids, int64_t E) {
  const std::vector<Id> all = contents<Id>(ids);
  for (size_t slot = 0; slot < all.size(); ++slot)
    if (expert_of(all[slot], E) < 0 && all[slot] != -1)
      fail(kOp, ": topk_ids must be -1 or from 0 to ", E - 1, ", got ", all[slot], " in slot ", slot);
}

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

}  // namespace

Results<3> sort_tokens_op(const Tensor& topk_ids, int64_t num_experts) {
  constexpr const Argument& kIds = argument(kOp, "topk_ids");
  check(kIds, topk_ids);
  if (num_experts < 1 || num_experts > kMaxExperts)
    fail(kOp, ": num_experts must be from 1 to ", kMaxExperts, ", got ", num_experts);
  SortTokensParams p = {};
  p.is_int64 = topk_ids.dtype == kInt64;
  if (flag_is_set("MOE_FP8_VALIDATE"))
    (p.is_int64 ? validate_ids<int64_t> : validate_ids<int>)(topk_ids, num_experts);
  const bool matrix = topk_ids.dim == 2;
  p.top_k = topk_ids.sizes[topk_ids.dim - 1];
  p.N = matrix ? topk_ids.sizes[0] * p.top_k : p.top_k;
  p.row_stride = matrix ? topk_ids.strides[0] : p.top_k;
  const Call call(kOp, "topk_ids", topk_ids);
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

}  // namespace moe_fp8

MOE_FP8_REGISTER(sort_tokens)
