#include "low_rank/cast_factor.h"

#include "ops/checks.h"

namespace moe_fp8 {
namespace {

constexpr const char* kOp = "cast_factor";
// Dimensions of out, the outermost first: experts, rows, columns.
constexpr const char *kOrders3[] = {"erc", "ecr", "rec", "rce", "cer", "cre"}, *kOrders2[] = {"rc", "cr"};

}  // namespace

Results<1> cast_factor_op(const Tensor& m, int64_t rows, int64_t cols, std::string_view order, int32_t dtype,
                          std::optional<int64_t> num_experts, double scaling) {
  const bool of_experts = m.dim == 3;
  check_choice(kOp, "order", order, of_experts ? 6 : 2, [&](int i) { return (of_experts ? kOrders3 : kOrders2)[i]; });
  check_count(kOp, "rows", rows);
  check_count(kOp, "cols", cols);
  if (num_experts && !of_experts)
    fail(kOp, ": num_experts must be None with m of 2 dimensions, got ", *num_experts);
  if (of_experts) check_limit(kOp, "m", m.sizes[0], "experts");
  const int64_t experts = num_experts.value_or(of_experts ? m.sizes[0] : 1);
  check_count(kOp, "num_experts", experts);
  check_dtypes({kOp, "dtype"}, Dtypes::kInput, dtype);

  const Call call(kOp, "m", m);
  const std::string_view names = of_experts ? "erc" : "rc";
  const int64_t by_name[] = {experts, rows, cols}, *const sizes = by_name + (3 - m.dim);
  int64_t ordered[kFactorDims];
  CastFactorParams p = {m.data, nullptr, {{1, 1, 0}, {1, 1, 0}, {1, 1, 0}}, float(scaling), in_type(m), in_type(dtype)};
  for (int64_t i = 0; i < m.dim; ++i) {
    const size_t d = names.find(order[i]);
    ordered[i] = sizes[d];
    p.dims[m.dim - 1 - i] = {sizes[d], std::min(sizes[d], m.sizes[d]), m.strides[d]};
  }
  Handle out = call.empty(ordered, m.dim, dtype);
  p.out = data(out);
  MOE_FP8_RUN(call, cast_factor, p);
  if (order == names) return results(out);
  int64_t *strides_of = nullptr, strides[kFactorDims];
  check_torch(aoti_torch_get_strides(out.get(), &strides_of));
  for (int64_t i = 0; i < m.dim; ++i) strides[names.find(order[i])] = strides_of[i];
  Handle permuted = view(out, sizes, strides, m.dim);
  return results(permuted);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(cast_factor)
