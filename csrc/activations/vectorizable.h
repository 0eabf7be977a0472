// Whether the rows of a matrix can be read or written in vectors.
#pragma once
#include <cstdint>

namespace moe_fp8 {

// True if F is a multiple of 8, and p and the distance of its rows are multiples of n elements of `bytes` bytes each.
inline bool rows_are_vectorizable(const void* p, int64_t stride, int64_t F, int64_t rows, int64_t bytes,
                                  int64_t n = 8) {
  const uint64_t row_distance = rows > 1 ? stride * bytes : 0;
  return F % 8 == 0 && (reinterpret_cast<uintptr_t>(p) | row_distance) % (n * bytes) == 0;
}

}  // namespace moe_fp8
