// Sums the rows of each group: the gradient of a bias.
//
// out[e, n] = sum over the rows r of group e of RN32(score of r * x[row of r, n])
//
// Row r is row r of x, or a row taken by index. Scores are given by row or by slot. An index that is no slot gives a
// row of +0. x has any row stride; out [E, N] is float32 and contiguous. offs are not trusted.
//
// Sums are in float32, in one order on every device. It depends on the places of rows in their group alone: fours of
// neighbours are added, (a + b) + (c + d), then fours of these sums, until each is the sum of 256 rows. Rows behind the
// group's last are +0. The sums of 256 rows are added from +0, one after the other. Every NaN is the quiet one without
// a sign.
#pragma once
#include <cstdint>

#include "numerics/floats.h"
#include "numerics/groups.h"

namespace moe_fp8 {

constexpr int kRowsOfSum = 256;  // whose sum is a tree; these sums are added one after the other

// Input and output of the second step: partial sums of neighbouring rows of a group, which another kernel has written,
// are added up to `out`.
struct PartialSums {
  float* partials;  // [partials, N]
  int rows;         // of a partial sum: 16 or 64
  int align;        // group e begins at row sum over i < e of round_up(size of i, align), counted in partial sums
  bool by_feature;  // columns of partials are (feature, projection); columns of `out` are (projection, feature)
  const int* offs;  // [E]
  int E;
  int64_t x_rows, N;
  float* out;
};

struct SumGroupsParams {
  const void* x;
  const int* offs;  // [E]
  int E;
  float* out;
  float* scratch;  // partial_words(), on a GPU
  int64_t rows, N;
  int64_t x_stride;  // elements
  InType in;
  RowIndex index;       // of `rows` rows; index.at null: row r is row r of x
  const float* scores;  // of rows, or with index of slots; null: ones

  struct Row { int at; float score; };  // at -1: a row of +0
  MOE_HD Row row(int64_t r) const {
    if (!index.at) return {int(r), scores ? scores[r] : 1.f};
    const int slot = index.slot(r);
    if (slot < 0) return {-1, 0.f};
    return {int(index.row_of(uint32_t(slot))), scores ? scores[slot] : 1.f};
  }
};

constexpr int kRowsOfPartial = 64;  // in the kernel that reads x
inline int64_t partial_words(const SumGroupsParams& p) {
  return padded_extent(p.rows, p.E, kRowsOfPartial) / kRowsOfPartial * p.N;
}

// On the current GPU, where the result is 0 or the runtime's error code, and on the CPU.
int sum_groups(const SumGroupsParams& p, void* stream);
void sum_groups_cpu(const SumGroupsParams& p);

// The second half of sum_groups(), for kernels that make partial sums themselves.
int sum_partials(const PartialSums& p, void* stream);

}  // namespace moe_fp8
