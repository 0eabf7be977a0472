// Token-group arithmetic. Offsets are data: nothing here trusts them.
#pragma once
#include "numerics/platform.h"

namespace moe_fp8 {

constexpr int kMaxExperts = 1024, kMaxAlign = 256;

template <class T>
MOE_HD constexpr T round_up(T n, T multiple) { return (n + multiple - 1) / multiple * multiple; }
template <class T>
MOE_HD constexpr T ceil_div(T n, T d) { return (n + d - 1) / d; }

MOE_HD int clamp_offset(int offset, int rows) { return offset < 0 ? 0 : offset > rows ? rows : offset; }

// Rows of the padded layout: room for every group rounded up to `align`, whatever the sizes are.
MOE_HD constexpr int64_t padded_extent(int64_t rows, int64_t experts, int64_t align) {
  return round_up(rows, align) + experts * align;
}

}  // namespace moe_fp8
