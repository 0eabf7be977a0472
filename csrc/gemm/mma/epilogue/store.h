// From sums in registers to out.
#pragma once
#include "gemm/mma/pipeline/multiply.h"
#include "platform/arithmetic.h"

namespace moe_fp8::mma {

// Eight neighbouring elements of out, or the first `count` of them, become or are raised by values.
MOE_DEVICE void store_eight(const ScaledGroupedMmParams& p, int64_t at, int count, bool whole, float (&value)[8]) {
  if (p.out_float32) {
    float* out = static_cast<float*>(p.out) + at;
    if (whole) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Vec16& to = reinterpret_cast<Vec16*>(out)[half];
        const Vec16 old = p.adds ? to : Vec16{};
        Vec16 v;
#pragma unroll
        for (int j = 0; j < 4; ++j)
          v.w[j] = as_bits(p.adds ? as_float(old.w[j]) + value[4 * half + j] : value[4 * half + j]);
        to = v;
      }
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (j < count) out[j] = p.adds ? out[j] + value[j] : value[j];
    }
  } else {
    uint16_t* out = static_cast<uint16_t*>(p.out) + at;
    if (whole) {
      Vec16& to = *reinterpret_cast<Vec16*>(out);
      const Vec16 old = p.adds ? to : Vec16{};
      Vec16 v;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (p.adds) {
          value[2 * j] = element<BF16>(old.w[j], 0) + value[2 * j];
          value[2 * j + 1] = element<BF16>(old.w[j], 1) + value[2 * j + 1];
        }
        v.w[j] = BF16::from_float(value[2 * j]) | uint32_t(BF16::from_float(value[2 * j + 1])) << 16;
      }
      to = v;
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (j < count) out[j] = BF16::from_float(p.adds ? BF16::to_float(out[j]) + value[j] : value[j]);
    }
  }
}

template <class T>
MOE_DEVICE void store_tile(const ScaledGroupedMmParams& p, const gemm::Tile& tile, const Lane<T>& lane,
                           typename Lane<T>::Sums& sums) {
  const bool empty = p.groups_of_sum && tile.depth == 0;  // zeros, even where the scale of nothing is not finite
  if (empty && p.adds) return;
  const bool whole = p.N % 8 == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
  const int64_t group = p.groups_of_sum ? tile.expert : 0;
#pragma unroll
  for (int n = 0; n < Lane<T>::kBeside; ++n) {
    const int left = tile.columns - lane.column_of(n);
    if (left <= 0) continue;
    float of_column[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      of_column[j] = T::kBlock == 0 && j < left
                         ? p.scale_b.at(tile.expert, tile.column + lane.column_of(n) + j, {}) : 0.f;
#pragma unroll
    for (int m = 0; m < Lane<T>::kBelow; ++m)
#pragma unroll
      for (int i = 0; i < kPatchLaneRows; ++i) {
        if (lane.row_of(m, i) >= tile.rows) continue;
        const int64_t row = tile.row_of_a + lane.row_of(m, i);
        const float of_row = T::kBlock == 0 ? p.scale_a.at(group, row, {}) : 0.f;
        float value[8];
#pragma unroll
        for (int j = 0; j < 8; ++j)
          value[j] = empty ? 0.f : T::kBlock == 0 ? sums[m][n][i][j] * of_row * of_column[j] : sums[m][n][i][j];
        store_eight(p, (group * p.M + row) * p.N + tile.column + lane.column_of(n), left, whole, value);
      }
  }
}

// Rows behind the last group, by all threads of all blocks.
template <class T>
MOE_DEVICE void clear_tail(const ScaledGroupedMmParams& p, const Shared<T>& shared) {
  auto* out = static_cast<uint16_t*>(p.out);
  const int64_t words = p.out_float32 ? 2 : 1, end = p.M * p.N * words, step = int64_t(gridDim.x) * kThreads;
  const int64_t begin = shared.groups.end[p.E] * p.N * words;
  const int64_t skew = (reinterpret_cast<uintptr_t>(out + begin) % 16) / 2, ahead = skew ? 8 - skew : 0;
  const int64_t first = begin + ahead < end ? begin + ahead : end, chunks = (end - first) / 8;
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t i = thread; i < chunks; i += step) reinterpret_cast<Vec16*>(out + first)[i] = Vec16{};
  if (thread < first - begin) out[begin + thread] = 0;
  if (thread < end - first - 8 * chunks) out[first + 8 * chunks + thread] = 0;
}

}  // namespace moe_fp8::mma
