// The epilogue: from sums in registers to out, in bfloat16 or float32, stored or added as p.accumulate says. Unlike in
// sm90 that is a run-time choice: a policy for each would double the instances, which every architecture compiles.
#pragma once
#include "gemm/mma/pipeline/multiply.h"

namespace moe_fp8::mma {

struct StoreOrAdd {
  // Stores or adds a lane's sums of a tile, times the row scales if there are any. Called by all threads.
  template <class T>
  static MOE_DEVICE void finish_tile(const ScaledGroupedMmParams& p, const gemm::Tile& tile, const LaneMap<T>& lane,
                                     typename LaneMap<T>::Sums& sums) {
    const bool empty = p.k_grouped && tile.k_size == 0;  // zeros, even if the scales of an empty sum are not finite
    if (empty && p.accumulate) return;
    const bool vectors = p.N % 8 == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0 && !p.out_transposed;
    const int64_t group = p.k_grouped ? tile.expert : 0;
    const int64_t row_step = p.out_transposed ? 1 : p.N, column_step = p.out_transposed ? p.M : 1;
#pragma unroll
    for (int n = 0; n < LaneMap<T>::kPatchesN; ++n) {
      const int columns = tile.columns - lane.out_column(n);
      if (columns <= 0) continue;
      float column_scale[8];
#pragma unroll
      for (int j = 0; j < 8; ++j)
        column_scale[j] = T::kBlock == 0 && j < columns
                              ? p.scale_b.at(tile.expert, tile.column + lane.out_column(n) + j, {}) : 0.f;
#pragma unroll
      for (int m = 0; m < LaneMap<T>::kPatchesM; ++m)
#pragma unroll
        for (int i = 0; i < kPatchLaneRows; ++i) {
          if (lane.out_row(m, i) >= tile.rows) continue;
          const int64_t row = tile.a_row + lane.out_row(m, i);
          const float row_scale = T::kBlock == 0 ? p.scale_a.at(group, row, {}) : 0.f;
          float value[8];
#pragma unroll
          for (int j = 0; j < 8; ++j)
            value[j] = empty ? 0.f : T::kBlock == 0 ? sums[m][n][i][j] * row_scale * column_scale[j] : sums[m][n][i][j];
          const int64_t column = tile.column + lane.out_column(n);
          write_eight(p, group * p.M * p.N + row * row_step + column * column_step, column_step, columns,
                      vectors, value);
        }
    }
  }

  // Zeros in the rows behind the last group, by all threads of all blocks.
  static MOE_DEVICE void clear_tail(const ScaledGroupedMmParams& p, const gemm::GroupOffsets& groups) {
    auto* out = static_cast<uint16_t*>(p.out);
    const int64_t words = p.out_float32 ? 2 : 1, end = p.M * p.N * words, step = int64_t(gridDim.x) * kThreads;
    const int64_t begin = groups.offsets[p.E] * p.N * words;
    const int64_t skew = (reinterpret_cast<uintptr_t>(out + begin) % 16) / 2, ahead = skew ? 8 - skew : 0;
    const int64_t first = begin + ahead < end ? begin + ahead : end, chunks = (end - first) / 8;
    const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    for (int64_t i = thread; i < chunks; i += step) reinterpret_cast<Vec16*>(out + first)[i] = Vec16{};
    if (thread < first - begin) out[begin + thread] = 0;
    if (thread < end - first - 8 * chunks) out[first + 8 * chunks + thread] = 0;
  }

 private:
  // Writes the first `count` of eight neighbours in a row of out, `step` elements apart. vectors: all eight exist and
  // lie side by side, at a multiple of 16 bytes.
  static MOE_DEVICE void write_eight(const ScaledGroupedMmParams& p, int64_t at, int64_t step, int count, bool vectors,
                                     float (&value)[8]) {
    if (p.out_float32) {
      float* out = static_cast<float*>(p.out) + at;
      if (vectors) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Vec16& to = reinterpret_cast<Vec16*>(out)[half];
          const Vec16 old = p.accumulate ? to : Vec16{};
          Vec16 v;
#pragma unroll
          for (int j = 0; j < 4; ++j)
            v.w[j] = as_bits(p.accumulate ? as_float(old.w[j]) + value[4 * half + j] : value[4 * half + j]);
          to = v;
        }
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j, out += step)
          if (j < count) *out = p.accumulate ? *out + value[j] : value[j];
      }
    } else {
      uint16_t* out = static_cast<uint16_t*>(p.out) + at;
      if (vectors) {
        Vec16& to = *reinterpret_cast<Vec16*>(out);
        const Vec16 old = p.accumulate ? to : Vec16{};
        Vec16 v;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (p.accumulate) {
            value[2 * j] = element<BF16>(old.w[j], 0) + value[2 * j];
            value[2 * j + 1] = element<BF16>(old.w[j], 1) + value[2 * j + 1];
          }
          v.w[j] = BF16::from_float(value[2 * j]) | uint32_t(BF16::from_float(value[2 * j + 1])) << 16;
        }
        to = v;
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j, out += step)
          if (j < count) *out = BF16::from_float(p.accumulate ? BF16::to_float(*out) + value[j] : value[j]);
      }
    }
  }
};

}  // namespace moe_fp8::mma
