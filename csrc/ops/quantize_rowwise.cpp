#include "kernels/quantize_rowwise.h"

#include "ops/common.h"
#include "ops/cpu_loops.h"
#include "ops/leading.h"

namespace moe_fp8 {
namespace {

constexpr const char* kOp = "quantize_rowwise";

}  // namespace

Results<2> quantize_rowwise_op(const Tensor& input, std::optional<int32_t> dtype, bool pow2_scale) {
  const InType in = in_type(kOp, "x", input);
  if (input.dim < 1 || input.dim > 7) fail(kOp, ": x must have 1 to 7 dimensions, got ", input.dim);
  check_inner_stride(kOp, "x", input);
  check_size(kOp, "x", input.sizes[input.dim - 1], "columns");
  const Call call(kOp, "x", input);
  const Fp8Type out = call.out_type(dtype);
  const int64_t K = input.sizes[input.dim - 1];

  std::optional<LeadingRows> rows = as_rows(input);
  std::optional<Tensor> copy;
  if (!rows) rows = as_rows(copy.emplace(contiguous(input)));
  if (input.empty() && K > 0) rows = LeadingRows{1, 0, 0, 0};
  const Tensor& x = copy ? *copy : input;

  Handle q = call.empty(input.sizes, input.dim, kFp8Dtypes[int(out)]);
  Handle scale = call.empty(input.sizes, input.dim - 1, kFloat32);

#if defined(MOE_FP8_GPU)
  if (x.on_gpu()) {
    call.check(quantize_rowwise({x.data, data(q), data<float>(scale), rows->outer, rows->rows, K, rows->outer_stride,
                                 rows->row_stride, in, out, pow2_scale}, call.stream()));
    return results(q, scale);
  }
#endif
  dispatch(in, out, [&, r = *rows](auto in_tag, auto out_tag) {
    using In = decltype(in_tag);
    const auto* base = x.as<typename In::Bits>();
    auto row_of = [=](int64_t i) { return base + i / r.rows * r.outer_stride + i % r.rows * r.row_stride; };
    rowwise_loop<In, decltype(out_tag)::value>(row_of, r.outer * r.rows, K, pow2_scale, data<uint8_t>(q),
                                               data<float>(scale));
    return 0;
  });
  return results(q, scale);
}

}  // namespace moe_fp8

MOE_FP8_REGISTER(quantize_rowwise)
