#include "gemm/scaled_grouped_mm.h"

#include "gemm/backends.h"
#include "gemm/product.h"
#include "ops/operands.h"

namespace moe_fp8 {
namespace {

constexpr const char* kOp = "scaled_grouped_mm";

Handle run(const Call& call, const Product& product) {
  for (const Backend& backend : backends())
    if (backend.takes(product)) return Handle(backend.run(call, product));
  fail(kOp, ": a must be on a device that this moe_fp8_ext was built for, got ", device_name(product.a));
}

}  // namespace

Results<1> scaled_grouped_mm_op(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                                const Tensor& offs, std::string_view format, int64_t align,
                                std::optional<int32_t> out_dtype, bool use_fast_accum) {
  constexpr const Argument &kA = argument(kOp, "a"), &kB = argument(kOp, "b"), &kOffs = argument(kOp, "offs"),
                           &kScaleA = argument(kOp, "scale_a"), &kScaleB = argument(kOp, "scale_b");
  const FormatId id = check_format(kOp, format);
  const Format& f = format_of(id);
  check(kA, a);
  check(kB, b, a);
  const int64_t k_dim = b.dim - 2, n_dim = b.dim - 1;
  ScaledGroupedMmParams p = {};
  p.groups_of_sum = b.dim == 2;
  p.M = a.sizes[0];
  p.K = a.sizes[1];
  p.N = b.sizes[n_dim];
  if (b.sizes[k_dim] != p.K)
    fail(kOp, ": b must have size ", p.K, " in dimension ", k_dim, " (the last of a), got ", b.sizes[k_dim]);
  const int64_t grouped = p.groups_of_sum ? p.K : p.M;
  check_offs(kOffs, offs, a, grouped, p.groups_of_sum ? "columns" : "rows");
  p.E = offs.sizes[0];
  if (!p.groups_of_sum && b.sizes[0] != p.E)
    fail(kOp, ": b must hold one expert for each of the ", p.E, " entries of offs, got ", b.sizes[0]);
  check_align(kOp, align);
  if (f.block)
    check_limit(kOp, "a", padded_extent(grouped, p.E, kGroupScales),
                p.groups_of_sum ? "columns with padding" : "rows with padding");
  check(kScaleA, scale_a, a);
  check(kScaleB, scale_b, a);
  if (p.groups_of_sum) {
    p.scale_a = scales_of_tokens(kScaleA, scale_a, f, p.M, p.K, offs);
    p.scale_b = scales_of_tokens(kScaleB, scale_b, f, p.N, p.K, offs, true);
    if (f.order == ScaleOrder::kColumnMajor) check_size(kScaleB, scale_b, 0, scale_a.sizes[1]);  // blocks of one sum
  } else {
    p.scale_a = scales_of_rows(kScaleA, scale_a, f, a.sizes, 1, p.M, p.K, p.E);
    p.scale_b = scales_of_experts(kScaleB, scale_b, f, p.E, p.N, p.K, true);
    p.b_group_stride = b.strides[0];
  }
  const int32_t dtype = out_dtype.value_or(kBFloat16);
  if (dtype != kBFloat16 && dtype != kFloat32)
    fail(kOp, ": out_dtype must be bfloat16 or float32, got ", dtype_name(dtype));
  p.out_float32 = dtype == kFloat32;
  p.a_type = fp8_type(a);
  p.b_type = fp8_type(b);
  p.a = a.as<uint8_t>();
  p.b = b.as<uint8_t>();
  p.offs = offs.as<int>();
  p.a_stride = a.strides[0];
  p.b_stride = b.strides[n_dim];
  const Call call(kOp, "a", a);
  Handle out = run(call, {p, id, align, use_fast_accum, a, b, scale_a, scale_b});
  return results(out);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(scaled_grouped_mm)
