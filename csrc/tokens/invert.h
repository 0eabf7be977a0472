// The inverse of indices, which need be neither distinct nor complete.
//
// inverse[i] = the largest p with indices[p] == i, else -1;  i in [0, size), p in [0, count)
//
// Indices out of [0, size) are skipped. count is at most 2^31 - 1.
#pragma once
#include <cstdint>

namespace moe_fp8 {

int invert_indices(const int* indices, int64_t count, int* inverse, int64_t size, void* stream);
void invert_indices_cpu(const int* indices, int64_t count, int* inverse, int64_t size);

}  // namespace moe_fp8
