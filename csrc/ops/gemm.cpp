#include "gemm/scaled_grouped_mm.h"

#include "ops/gemm_backends.h"
#include "ops/gemm_product.h"
#include "ops/operands.h"
#include "ops/rows.h"

namespace moe_fp8 {
namespace {

constexpr const char *kOp = "scaled_grouped_mm", *kAdd = "add_scaled_grouped_mm";

// Checks the arguments that both ops take. The caller adds the total and the dtype of the output.
Product check_product(const char* op, const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                      std::string_view format, const Tensor& offs, int64_t align, bool use_fast_accum,
                      std::optional<std::string_view> rounding, const std::optional<Tensor>& indices = {},
                      std::optional<int64_t> top_k = {}) {
  const FormatId id = check_format(op, format);
  const Format& f = format_of(id);
  std::optional<Rounding> promised;
  if (rounding) promised = check_rounding(op, f, rounding);
  const int64_t k_dim = b.dim - 2, n_dim = b.dim - 1;
  ScaledGroupedMmParams p = {};
  p.k_grouped = b.dim == 2;
  p.M = a.sizes[0];
  check_both_or_none(op, "indices", indices.has_value(), "top_k", top_k.has_value());
  if (indices) {
    if (p.k_grouped) fail(op, ": indices must be None with b of 2 dimensions, got a tensor");
    p.index = check_indices(op, *indices, a.sizes[0], *top_k);
    p.M = indices->sizes[0];
  }
  p.K = a.sizes[1];
  p.N = b.sizes[n_dim];
  if (b.sizes[k_dim] != p.K)
    fail(op, ": b must have size ", p.K, " in dimension ", k_dim, " (the last of a), got ", b.sizes[k_dim]);
  const int64_t grouped = p.k_grouped ? p.K : p.M;
  validate_offs(op, offs, grouped, indices ? "indices" : p.k_grouped ? "columns" : "rows");
  p.E = offs.sizes[0];
  if (!p.k_grouped && b.sizes[0] != p.E)
    fail(op, ": b must hold one expert for each of the ", p.E, " entries of offs, got ", b.sizes[0]);
  check_align(op, align);
  if (p.k_grouped) validate_aligned(op, offs, align);
  if (f.block)
    check_extent(op, indices ? "indices" : "a", grouped, p.E, kGroupScales,
                 p.k_grouped ? "columns with padding" : "rows with padding");
  const Name scale_a_arg = {op, "scale_a"}, scale_b_arg = {op, "scale_b"};
  if (p.k_grouped) {
    p.scale_a = scales_of_tokens(scale_a_arg, scale_a, f, p.M, p.K, offs);
    p.scale_b = scales_of_tokens(scale_b_arg, scale_b, f, p.N, p.K, offs, true);
    if (f.order == ScaleOrder::kColumnMajor) check_size(scale_b_arg, scale_b, 0, scale_a.sizes[1]);
  } else {
    p.scale_a = scales_of_rows(scale_a_arg, scale_a, f, a.sizes, 1, a.sizes[0], p.K, indices ? kNoGroups : p.E);
    p.scale_b = scales_of_experts(scale_b_arg, scale_b, f, p.E, p.N, p.K, true);
    p.b_group_stride = b.strides[0];
  }
  p.a_type = fp8_type(a);
  p.b_type = fp8_type(b);
  p.a = a.as<uint8_t>();
  p.b = b.as<uint8_t>();
  p.offs = offs.as<int>();
  p.a_stride = a.strides[0];
  p.b_stride = b.strides[n_dim];
  return {p, id, align, use_fast_accum, promised, a, b, scale_a, scale_b, nullptr};
}

// Checks the factors of a low-rank term, low_rank_a [M, R] and low_rank_b [E, R, N].
LowRankTerm check_low_rank(const ScaledGroupedMmParams& p, const Tensor& a, const Tensor& b) {
  if (p.k_grouped) fail(kOp, ": low_rank_a must be None with b of 2 dimensions, got a tensor");
  check_size({kOp, "low_rank_a"}, a, 0, p.M);
  check_sizes({kOp, "low_rank_b"}, b, {p.E, a.sizes[1], p.N});
  return {a.as<uint16_t>(), b.as<uint16_t>(), a.strides[0], b.strides[2], b.strides[0], int(a.sizes[1])};
}

const Backend& backend_of(const char* op, const Product& product) {
  for (const Backend& backend : backends())
    if (backend.takes(product)) return backend;
  fail(op, ": a must be on a device that this moe_fp8_ext was built for, got ", device_name(product.a));
}

}  // namespace

Handle transposed_out(const Call& call, const Product& product) {
  const ScaledGroupedMmParams& p = product.p;
  const Handle out = call.empty({p.E, p.N, p.M}, p.out_float32 ? kFloat32 : kBFloat16);
  const int64_t row = std::max<int64_t>(p.M, 1);  // strides as torch's: every size counts as at least 1
  return view(out, {p.E, p.M, p.N}, {std::max<int64_t>(p.N, 1) * row, 1, row});
}

Results<1> scaled_grouped_mm_op(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                                std::string_view format, const Tensor& offs, const std::optional<Tensor>& indices,
                                std::optional<int64_t> top_k, int64_t align, std::optional<int32_t> out_dtype,
                                bool use_fast_accum, std::optional<std::string_view> rounding, bool out_transposed,
                                const std::optional<Tensor>& low_rank_a, const std::optional<Tensor>& low_rank_b) {
  Product product =
      check_product(kOp, a, b, scale_a, scale_b, format, offs, align, use_fast_accum, rounding, indices, top_k);
  const int32_t dtype = out_dtype.value_or(kBFloat16);
  check_dtypes({kOp, "out_dtype"}, Dtypes::kProduct, dtype);
  product.p.out_float32 = dtype == kFloat32;
  if (out_transposed && !product.p.k_grouped)
    fail(kOp, ": out_transposed must be False with b of 3 dimensions, got True");
  check_both_or_none(kOp, "low_rank_a", low_rank_a.has_value(), "low_rank_b", low_rank_b.has_value());
  if (low_rank_a) product.p.low_rank = check_low_rank(product.p, *low_rank_a, *low_rank_b);
  const Call call(kOp, "a", a);  // sets the device that the backends look at
  const Backend& backend = backend_of(kOp, product);
  if (indices && !(backend.can_gather_rows && backend.can_gather_rows(product))) {
    const std::optional<Tensor> groups(std::in_place, share(offs.handle));
    const auto [q, scale] = permute_quantized_op(a, scale_a, format, *indices, *top_k, groups);
    Handle moved(q), moved_scale(scale);
    const Tensor rows(std::move(moved)), row_scales(std::move(moved_scale));
    return scaled_grouped_mm_op(rows, b, row_scales, scale_b, format, offs, {}, {}, align, out_dtype, use_fast_accum,
                                rounding, false, low_rank_a, low_rank_b);
  }
  product.p.out_transposed = out_transposed && backend.can_transpose && backend.can_transpose(product);
  const LowRankTerm low_rank = product.p.low_rank;
  const bool adds = low_rank.rank > 0 && !(backend.can_add_low_rank && backend.can_add_low_rank(product));
  if (adds || low_rank.rank == 0) product.p.low_rank = {};
  Handle out(backend.run(call, product));
#if defined(MOE_FP8_GPU)
  if (adds) {
    product.p.low_rank = low_rank;
    product.p.out = data(out);
    call.check(add_low_rank(product.p, call.stream()));
  }
#endif
  if (out_transposed && !product.p.out_transposed) {
    const Handle contiguous = std::move(out);
    out = transposed_out(call, product);
    StableIValue stack[] = {to_word(share(out)), to_word(share(contiguous)), to_word(false)};
    call_torch("aten::copy_", "", stack);
  }
  return results(out);
}

Results<0> add_scaled_grouped_mm_op(const Tensor& total, const Tensor& a, const Tensor& b, const Tensor& scale_a,
                                    const Tensor& scale_b, std::string_view format, const Tensor& offs, int64_t align,
                                    bool use_fast_accum, std::optional<std::string_view> rounding) {
  Product product = check_product(kAdd, a, b, scale_a, scale_b, format, offs, align, use_fast_accum, rounding);
  check_sizes({kAdd, "total"}, total, {product.p.E, product.p.M, product.p.N});
  product.p.out_float32 = total.dtype == kFloat32;
  product.p.accumulate = true;
  product.total = &total;
  const Call call(kAdd, "a", a);  // sets the device that the backends look at
  Handle(backend_of(kAdd, product).run(call, product));
  return {};
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(scaled_grouped_mm)
MOE_FP8_REGISTER(add_scaled_grouped_mm)
