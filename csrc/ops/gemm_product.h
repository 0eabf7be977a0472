// A call of scaled_grouped_mm or add_scaled_grouped_mm whose arguments were checked.
#pragma once
#include <optional>

#include "gemm/scaled_grouped_mm.h"
#include "numerics/format.h"
#include "ops/tensor.h"

namespace moe_fp8 {

class Call;  // ops/call.h

struct Product {
  ScaledGroupedMmParams p;  // out is null: the backend allocates it
  FormatId format;
  int64_t align;            // a multiple of all offs, in 2D x 2D
  bool use_fast_accum;
  std::optional<Rounding> rounding;  // of all scales, which the caller promises; null: not known
  const Tensor &a, &b, &scale_a, &scale_b;
  const Tensor* total;      // the total that the product is added to; null: out is new
};

// An out [E, M, N] of a 2D x 2D product that lies as a contiguous [E, N, M].
Handle transposed_out(const Call& call, const Product& product);

// The backend of the CPU: dequantizes operands to float32 and multiplies them by torch, group by group.
void scaled_grouped_mm_cpu(const Call& call, const ScaledGroupedMmParams& p);

}  // namespace moe_fp8
