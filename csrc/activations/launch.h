// Which rows of h are of vectors, and how rows are shared out.
#pragma once
#include "activations/activations.h"
#include "primitives/wave_rows.h"

namespace moe_fp8 {

// Whether rows of F elements, `bytes` each, from p on are vectors of 8 elements that lie where vectors of n may.
inline bool is_of_vectors(const void* p, int64_t stride, int64_t F, int64_t rows, int64_t bytes, int64_t n = 8) {
  const uint64_t between = rows > 1 ? stride * bytes : 0;
  return F % 8 == 0 && (reinterpret_cast<uintptr_t>(p) | between) % (n * bytes) == 0;
}

}  // namespace moe_fp8
