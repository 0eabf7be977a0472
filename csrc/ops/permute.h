// What ops that take rows by index ask of it.
#pragma once
#include "kernels/invert.h"
#include "ops/rows.h"

namespace moe_fp8 {

// With MOE_FP8_VALIDATE=1 every index is -1 or one of [0, limit).
inline void validate_range(const char* op, const char* arg, const Tensor& indices, int64_t limit, const char* of) {
  if (!flag_is_set("MOE_FP8_VALIDATE")) return;
  const std::vector<int> at = contents(indices);
  for (size_t p = 0; p < at.size(); ++p)
    if (at[p] < -1 || at[p] >= limit)
      fail(op, ": ", arg, " must be -1 or one of the ", limit, " ", of, ", got ", at[p], " in place ", p);
}
// With MOE_FP8_VALIDATE=1 no index stands twice where that would lose one of its places.
inline void validate_distinct(const char* op, const char* arg, const Tensor& indices) {
  if (!flag_is_set("MOE_FP8_VALIDATE")) return;
  std::vector<int> at = contents(indices);
  std::sort(at.begin(), at.end());
  for (size_t p = 1; p < at.size(); ++p)
    if (at[p] >= 0 && at[p] == at[p - 1]) fail(op, ": ", arg, " must be distinct, got ", at[p], " twice");
}

// indices int32 [P] of slots of x's rows, top_k slots a row. With MOE_FP8_VALIDATE=1 each is -1 or one of them.
inline RowIndex check_indices(const char* op, const Tensor& indices, const char* like, const Tensor& x, int64_t rows,
                              int64_t top_k) {
  check_index(op, "indices", indices, like, x);
  check_size(op, "indices", indices.sizes[0], "entries");
  if (top_k < 1) fail(op, ": top_k must be at least 1, got ", top_k);
  if (top_k > kMaxRows || rows * top_k > kMaxRows)
    fail(op, ": top_k must give at most ", kMaxRows, " slots to ", rows, " rows, got ", top_k);
  validate_range(op, "indices", indices, rows * top_k, "slots");
  return RowIndex(indices.as<int>(), rows, top_k);
}

// Rows of x by index, on the CPU.
template <class Bits>
IndexedRows<Bits> indexed_rows(const Tensor& x, const RowIndex& index, const std::vector<uint32_t>& zeros) {
  return {x.as<Bits>(), x.strides[0], index, reinterpret_cast<const Bits*>(zeros.data())};
}

// inverse [size]: where each index stands, the last place of those that stand at several, -1 for those that do not.
inline void invert(const Call& call, const Tensor& indices, int* inverse, int64_t size) {
  const int* at = indices.as<int>();
#if defined(MOE_FP8_GPU)
  if (indices.on_gpu()) return call.check(invert_indices(at, indices.sizes[0], inverse, size, call.stream()));
#endif
  std::fill_n(inverse, size, -1);
  for (int64_t p = 0; p < indices.sizes[0]; ++p)
    if (at[p] >= 0 && at[p] < size) inverse[at[p]] = int(p);
}

}  // namespace moe_fp8
