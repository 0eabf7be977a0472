#include "ops/operands.h"
#include "ops/rows.h"
#include "tokens/combine.h"
#include "tokens/invert.h"
#include "tokens/permute.h"
#include "tokens/permute_quantized.h"

namespace moe_fp8 {
namespace {

constexpr const char *kIndices = "permute_indices", *kPad = "permute_pad", *kQuantized = "permute_quantized",
                     *kUnpermute = "unpermute";

template <class Count>
void validate_counts(Name arg, const Tensor& counts, int64_t num_tokens) {
  int64_t sum = 0;
  for (const Count count : contents<Count>(counts)) {
    if (count < 0) fail(arg.op, ": ", arg.arg, " must not be negative, got ", count);
    sum += std::min<int64_t>(count, kMaxRows);
  }
  if (sum > num_tokens)
    fail(arg.op, ": ", arg.arg, " must sum to at most the ", num_tokens, " tokens, got ", sum);
}

}  // namespace

Results<3> permute_indices_op(const Tensor& counts, int64_t num_local_experts, int64_t num_ranks, int64_t num_tokens,
                              int64_t align, bool align_empty) {
  constexpr const char *kOp = kIndices, *kArg = "tokens_per_rank_expert";
  check_range(kOp, "num_ranks", num_ranks, 1, kMaxCounts);
  check_range(kOp, "num_local_experts", num_local_experts, 1, kMaxExperts);
  const int64_t n = num_ranks * num_local_experts, got = product(counts.sizes, counts.dim);
  if (n > kMaxCounts)
    fail(kOp, ": num_ranks must be at most ", kMaxCounts / num_local_experts, " with ", num_local_experts,
         " experts, got ", num_ranks);
  if (counts.dim == 2 && (counts.sizes[0] != num_ranks || counts.sizes[1] != num_local_experts))
    fail(kOp, ": ", kArg, " must be [", num_ranks, ", ", num_local_experts, "], ranks by local experts, got [",
         counts.sizes[0], ", ", counts.sizes[1], "]");
  if (got != n) fail(kOp, ": ", kArg, " must have ", n, " entries, one a rank and local expert, got ", got);
  check_count(kOp, "num_tokens", num_tokens);
  check_align(kOp, align);
  const int64_t E = num_local_experts, P = check_extent(kOp, "num_tokens", num_tokens, E, align);
  const bool is_int64 = counts.dtype == kInt64;
  if (validates())
    (is_int64 ? validate_counts<int64_t> : validate_counts<int>)({kOp, kArg}, counts, num_tokens);
  const Call call(kOp, kArg, counts);
  Handle indices = call.empty({P}, kInt32), padded_offs = call.empty({E}, kInt32);
  Handle tokens_per_expert = call.empty({E}, kInt32);
  const PermuteIndicesParams p = {counts.data, is_int64, data<int>(indices), data<int>(padded_offs),
                                  data<int>(tokens_per_expert), num_ranks, E, num_tokens, P, int(align),
                                  align_empty ? int(align) : 0};
  MOE_FP8_RUN(call, permute_indices, p);
  return results(indices, padded_offs, tokens_per_expert);
}

Results<1> permute_pad_op(const Tensor& x, const Tensor& indices, int64_t top_k) {
  const RowIndex index = check_indices(kPad, indices, x.sizes[0], top_k);
  const Call call(kPad, "x", x);
  Handle out = call.empty({indices.sizes[0], x.sizes[1]}, x.dtype);
  gather_rows(call, x, out, index, indices.sizes[0]);
  return results(out);
}

Results<2> permute_quantized_op(const Tensor& q, const Tensor& scale, std::string_view format, const Tensor& indices,
                                int64_t top_k, const std::optional<Tensor>& offs) {
  const Format& f = format_of(check_format(kQuantized, format));
  const int64_t M = q.sizes[0], K = q.sizes[1];
  const RowIndex index = check_indices(kQuantized, indices, M, top_k);
  const int64_t P = indices.sizes[0];
  const OperandScales scales = scales_of_rows({kQuantized, "scale"}, scale, f, q.sizes, 1, M, K, kNoGroups);
  if (offs) validate_offs(kQuantized, *offs, P, "indices");
  const bool grouped = offs && f.blocked();
  const int64_t E = grouped ? offs->sizes[0] : kNoGroups;
  if (grouped) check_extent(kQuantized, "indices", P, E, kGroupScales);
  const Call call(kQuantized, "q", q);
  Handle out = call.empty({P, K}, q.dtype), out_scale = call.empty(scales_along_rows(f, P, K, E), f.scale_type);
  const CopyRowsParams rows = {q.data, data(out), index, P, K, q.strides[0]};
  if (f.order == ScaleOrder::kRowMajor) {  // scales are rows of bytes, as q is
    const int64_t bytes = scales.row_stride * element_size(scale.dtype);
    const CopyRowsParams scale_rows = {scale.data, data(out_scale), index, P, bytes, bytes};
    MOE_FP8_RUN(call, copy_rows, rows);
    MOE_FP8_RUN(call, copy_rows, scale_rows);
    return results(out, out_scale);
  }
  const int64_t words = f.blocked() ? padded_scale_columns(scales.blocks) / kScaleColumns : scales.blocks;
  const PermuteScalesParams p = {scale.data, data(out_scale), index, grouped ? ints(*offs) : nullptr, grouped ? E : 0,
                                 P, words, f.blocked(), scales.row_stride, scales.block_stride};
  MOE_FP8_RUN(call, permute_quantized, rows, p);
  return results(out, out_scale);
}

Results<1> unpermute_op(const Tensor& y, const Tensor& indices, int64_t top_k, int64_t num_tokens) {
  if (top_k > 1 && !is_one_of(kInputDtypes, y.dtype))  // several rows are summed
    fail(kUnpermute, ": y must be ", kAnInputDtype, " with top_k ", top_k, ", got ", dtype_name(y.dtype));
  check_count(kUnpermute, "num_tokens", num_tokens);
  check_indices(kUnpermute, indices, num_tokens, top_k);
  const int64_t rows = y.sizes[0], K = y.sizes[1], slots = num_tokens * top_k;
  if (indices.sizes[0] != rows)
    fail(kUnpermute, ": indices must have ", rows, " entries, one a row of y, got ", indices.sizes[0]);
  validate_distinct({kUnpermute, "indices"}, indices);
  const Call call(kUnpermute, "y", y);
  Handle out = call.empty({num_tokens, K}, y.dtype);
  if (K == 0) return results(out);
  const Handle scratch = call.empty({slots}, kInt32);
  int* const inverse = data<int>(scratch);
  MOE_FP8_RUN(call, invert_indices, indices.as<int>(), rows, inverse, slots);
  if (top_k == 1) {
    gather_rows(call, y, out, RowIndex(inverse, rows, 1), num_tokens);
    return results(out);
  }
  // Without scores.
  const CombineParams p = {y.data, inverse, nullptr, data(out), num_tokens, top_k, rows, K, y.strides[0],
                           in_type(y), false};
  MOE_FP8_RUN(call, combine, p);
  return results(out);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(permute_indices)
MOE_FP8_REGISTER(permute_pad)
MOE_FP8_REGISTER(permute_quantized)
MOE_FP8_REGISTER(unpermute)
