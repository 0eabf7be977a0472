#include "kernels/permute.h"

#include "ops/combine.h"
#include "ops/permute.h"

namespace moe_fp8 {
namespace {

void cpu_permute_indices(const PermuteIndicesParams& p) {
  const int64_t n = p.R * p.E;
  std::vector<int64_t> end(n + 1);  // of the tokens of each (rank, expert), from 1 on
  for (int64_t i = 0; i < n; ++i) end[i + 1] = std::min(p.M, end[i] + p.count(i));
  std::fill_n(p.indices, p.P, -1);
  for (int64_t e = 0, start = 0; e < p.E; ++e) {
    int* place = p.indices + start;
    for (int64_t i = e; i < n; i += p.E)
      for (int64_t token = end[i]; token < end[i + 1]; ++token) *place++ = int(token);
    const int64_t tokens = place - (p.indices + start);
    start += tokens ? round_up<int64_t>(tokens, p.align) : p.empty;
    p.tokens_per_expert[e] = int(tokens);
    p.padded_offs[e] = int(start);
  }
}

template <class Count>
void validate_counts(const char* op, const Tensor& counts, int64_t num_tokens) {
  int64_t sum = 0;
  for (const Count count : contents<Count>(counts)) {
    if (count < 0) fail(op, ": tokens_per_rank_expert must not be negative, got ", count);
    sum += std::min<int64_t>(count, kMaxRows);
  }
  if (sum > num_tokens)
    fail(op, ": tokens_per_rank_expert must sum to at most the ", num_tokens, " tokens, got ", sum);
}

// The backward of taking a row for each of its slots.
void sum_slots(const Call& call, const Tensor& y, const Handle& out, const int* inverse, int64_t tokens,
               int64_t top_k) {
  CombineParams p = {};
  p.y = y.data;
  p.inverse = inverse;
  p.out = data(out);
  p.T = tokens;
  p.top_k = top_k;
  p.P = y.sizes[0];
  p.K = y.sizes[1];
  p.y_stride = y.strides[0];
  p.in = in_type("unpermute", "y", y);
  combine(call, y, p);
}

}  // namespace

Results<3> permute_indices_op(const Tensor& counts, int64_t num_ranks, int64_t num_local_experts, int64_t num_tokens,
                              int64_t align, bool align_empty) {
  constexpr const char* kOp = "permute_indices";
  constexpr const char* kArg = "tokens_per_rank_expert";
  if (counts.dtype != kInt32 && counts.dtype != kInt64)
    fail(kOp, ": ", kArg, " must be int32 or int64, got ", dtype_name(counts.dtype));
  if (counts.dim != 1 && counts.dim != 2) fail(kOp, ": ", kArg, " must have 1 or 2 dimensions, got ", counts.dim);
  check_contiguous(kOp, kArg, counts);
  if (num_ranks < 1 || num_ranks > kMaxCounts)
    fail(kOp, ": num_ranks must be from 1 to ", kMaxCounts, ", got ", num_ranks);
  if (num_local_experts < 1 || num_local_experts > kMaxExperts)
    fail(kOp, ": num_local_experts must be from 1 to ", kMaxExperts, ", got ", num_local_experts);
  const int64_t n = num_ranks * num_local_experts, got = counts.sizes[0] * (counts.dim == 2 ? counts.sizes[1] : 1);
  if (n > kMaxCounts)
    fail(kOp, ": num_ranks must be at most ", kMaxCounts / num_local_experts, " with ", num_local_experts,
         " experts, got ", num_ranks);
  if (counts.dim == 2 && (counts.sizes[0] != num_ranks || counts.sizes[1] != num_local_experts))
    fail(kOp, ": ", kArg, " must be [", num_ranks, ", ", num_local_experts, "], ranks by local experts, got [",
         counts.sizes[0], ", ", counts.sizes[1], "]");
  if (got != n) fail(kOp, ": ", kArg, " must have ", n, " entries, one a rank and local expert, got ", got);
  check_count(kOp, "num_tokens", num_tokens);
  const int64_t E = num_local_experts, P = check_align(kOp, align, "num_tokens", num_tokens, E);
  if (flag_is_set("MOE_FP8_VALIDATE"))
    (counts.dtype == kInt64 ? validate_counts<int64_t> : validate_counts<int>)(kOp, counts, num_tokens);
  const Call call(kOp, kArg, counts);
  Handle indices = call.empty({P}, kInt32), padded_offs = call.empty({E}, kInt32);
  Handle tokens_per_expert = call.empty({E}, kInt32);
  const PermuteIndicesParams p = {counts.data, counts.dtype == kInt64, data<int>(indices), data<int>(padded_offs),
                                  data<int>(tokens_per_expert), num_ranks, E, num_tokens, P, int(align),
                                  align_empty ? int(align) : 0};
#if defined(MOE_FP8_GPU)
  if (counts.on_gpu()) {
    call.check(permute_indices(p, call.stream()));
    return results(indices, padded_offs, tokens_per_expert);
  }
#endif
  cpu_permute_indices(p);
  return results(indices, padded_offs, tokens_per_expert);
}

Results<1> permute_pad_op(const Tensor& x, const Tensor& indices, int64_t top_k) {
  constexpr const char* kOp = "permute_pad";
  check_rows(kOp, "x", x);
  const RowIndex index = check_indices(kOp, indices, "x", x, x.sizes[0], top_k);
  const Call call(kOp, "x", x);
  Handle out = call.empty({indices.sizes[0], x.sizes[1]}, x.dtype);
  copy_rows(call, x, out, index, indices.sizes[0]);
  return results(out);
}

Results<1> unpermute_op(const Tensor& y, const Tensor& indices, int64_t num_tokens, int64_t top_k) {
  constexpr const char* kOp = "unpermute";
  if (top_k > 1) check_tokens(kOp, "y", y);
  else check_rows(kOp, "y", y);
  check_count(kOp, "num_tokens", num_tokens);
  check_indices(kOp, indices, "y", y, num_tokens, top_k);
  if (indices.sizes[0] != y.sizes[0])
    fail(kOp, ": indices must have ", y.sizes[0], " entries, one a row of y, got ", indices.sizes[0]);
  validate_distinct(kOp, "indices", indices);
  const Call call(kOp, "y", y);
  const int64_t slots = num_tokens * top_k;
  Handle out = call.empty({num_tokens, y.sizes[1]}, y.dtype), inverse = call.empty({slots}, kInt32);
  invert(call, indices, data<int>(inverse), slots);
  if (top_k == 1) copy_rows(call, y, out, RowIndex(data<int>(inverse), y.sizes[0], 1), num_tokens);
  else sum_slots(call, y, out, data<int>(inverse), num_tokens, top_k);
  return results(out);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(permute_indices)
MOE_FP8_REGISTER(permute_pad)
MOE_FP8_REGISTER(unpermute)
