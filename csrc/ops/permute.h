// permute_quantized, for ops whose kernels take no rows by index.
#pragma once
#include "ops/tensor.h"

namespace moe_fp8 {

Results<2> permute_quantized_op(const Tensor& q, const Tensor& scale, std::string_view format, const Tensor& indices,
                                int64_t top_k, const std::optional<Tensor>& offs);

}  // namespace moe_fp8
