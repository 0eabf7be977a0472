#include "kernels/sort_tokens.h"

#include "ops/common.h"

namespace moe_fp8 {
namespace {

template <class Id>
void cpu_sort(const SortTokensParams& p) {
  const Id* ids = static_cast<const Id*>(p.ids);
  auto expert = [&](int64_t slot) { return expert_of(ids[slot / p.top_k * p.row_stride + slot % p.top_k], p.E); };
  std::vector<int> next(p.E + 1);
  for (int64_t slot = 0; slot < p.N; ++slot) ++next[expert(slot) + 1];
  next[0] = 0;  // it counted what belongs to no expert
  for (int e = 0; e < p.E; ++e) p.offs[e] = next[e + 1] += next[e];
  std::fill(p.permutation + next[p.E], p.permutation + p.N, -1);
  for (int64_t slot = 0; slot < p.N; ++slot) {
    const int e = expert(slot), place = e < 0 ? -1 : next[e]++;
    p.inverse[slot] = place;
    if (place >= 0) p.permutation[place] = int(slot);
  }
}

template <class Id>
void validate_ids(const char* op, const Tensor& ids, int64_t E) {
  const std::vector<Id> all = contents<Id>(ids);
  for (size_t slot = 0; slot < all.size(); ++slot)
    if (expert_of(all[slot], E) < 0 && all[slot] != -1)
      fail(op, ": topk_ids must be -1 or from 0 to ", E - 1, ", got ", all[slot], " in slot ", slot);
}

}  // namespace

Results<3> sort_tokens_op(const Tensor& topk_ids, int64_t num_experts) {
  constexpr const char* kOp = "sort_tokens";
  const bool is_int64 = topk_ids.dtype == kInt64;
  if (!is_int64 && topk_ids.dtype != kInt32)
    fail(kOp, ": topk_ids must be int32 or int64, got ", dtype_name(topk_ids.dtype));
  if (topk_ids.dim != 1 && topk_ids.dim != 2)
    fail(kOp, ": topk_ids must have 1 or 2 dimensions, got ", topk_ids.dim);
  check_inner_stride(kOp, "topk_ids", topk_ids);
  SortTokensParams p = {};
  p.top_k = topk_ids.sizes[topk_ids.dim - 1];
  p.N = topk_ids.dim == 1 ? p.top_k : topk_ids.sizes[0] * p.top_k;
  p.row_stride = topk_ids.dim == 1 ? p.top_k : topk_ids.strides[0];
  check_size(kOp, "topk_ids", p.N, "slots");
  if (num_experts < 1 || num_experts > kMaxExperts)
    fail(kOp, ": num_experts must be from 1 to ", kMaxExperts, ", got ", num_experts);
  if (flag_is_set("MOE_FP8_VALIDATE"))
    (is_int64 ? validate_ids<int64_t> : validate_ids<int>)(kOp, topk_ids, num_experts);
  const Call call(kOp, "topk_ids", topk_ids);
  Handle permutation = call.empty({p.N}, kInt32), offs = call.empty({num_experts}, kInt32);
  Handle inverse = call.empty(topk_ids.sizes, topk_ids.dim, kInt32);
  p.ids = topk_ids.data;
  p.permutation = data<int>(permutation);
  p.offs = data<int>(offs);
  p.inverse = data<int>(inverse);
  p.E = int(num_experts);
  p.is_int64 = is_int64;
#if defined(MOE_FP8_GPU)
  if (topk_ids.on_gpu()) {
    Handle counts = call.empty({sort_tokens_blocks(p.N), num_experts}, kInt32);
    p.counts = data<int>(counts);
    call.check(sort_tokens(p, call.stream()));
    return results(permutation, offs, inverse);
  }
#endif
  is_int64 ? cpu_sort<int64_t>(p) : cpu_sort<int>(p);
  return results(permutation, offs, inverse);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(sort_tokens)
