// From the stages in shared memory to sums in registers.
#pragma once
#include "gemm/mma/tiles.h"

namespace moe_fp8::mma {

// A lane's share of a tile: patches below and beside one another.
template <class T>
struct Lane {
  static constexpr int kBelow = kWaveRows / kPatchRows, kBeside = T::kWaveColumns / kPatchColumns;
  using Sums = PatchSums[kBelow][kBeside];

  int row, column;  // of the tile: the first of those that the lane has rows of operands of
  int part;

  MOE_DEVICE Lane() {
    const int lane = int(threadIdx.x) % kPatchWave, wave = int(threadIdx.x) / kPatchWave;
    row = wave % 2 * kWaveRows + patch_row(lane);
    column = wave / 2 * T::kWaveColumns + patch_row(lane);
    part = patch_part(lane);
  }
  // Of sums: rows and first columns.
  MOE_DEVICE int row_of(int below, int i) const { return row + below * kPatchRows + 8 * i; }
  MOE_DEVICE int column_of(int beside) const {
    return column - patch_row(int(threadIdx.x) % kPatchWave) + beside * kPatchColumns + 8 * part;
  }
};

template <class T>
using Eight = std::conditional_t<T::kMultipliesBytes, Vec8, Halves8>;

// Eight elements of a row of a stage, as the instructions take them. half: what bytes stand for.
template <class T, bool kE5M2>
MOE_DEVICE Eight<T> load_eight(const Vec16* stage, const uint16_t* half, int row, int step, int part) {
  const int place = place_of<T>(row, step * (kPatchDepth / 16) + part / 2);
  const Vec8 bytes = reinterpret_cast<const Vec8*>(stage)[2 * place + part % 2];
  if constexpr (T::kMultipliesBytes) {
    return bytes;
  } else {
    Halves8 halves;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t four[2];
      if constexpr (T::kLooksUp) {
        for (int pair = 0; pair < 2; ++pair) {
          const uint32_t bytes_of = bytes.w[i] >> (16 * pair);
          four[pair] = half[bytes_of & 0xffu] | uint32_t(half[bytes_of >> 8 & 0xffu]) << 16;
        }
      } else {
        fp8x4_to_f16x4<kE5M2>(bytes.w[i], four);
      }
      halves.w[2 * i] = four[0];
      halves.w[2 * i + 1] = four[1];
    }
    return halves;
  }
}

// Adds the products of 32 elements of a stage.
template <class T>
MOE_DEVICE void multiply_step(const Shared<T>& shared, int stage, int step, const Lane<T>& lane,
                              typename Lane<T>::Sums& sums) {
  constexpr bool kE5M2 = T::kTypes == Types::kE5M2;
  Eight<T> a[Lane<T>::kBelow][kPatchLaneRows];
#pragma unroll
  for (int m = 0; m < Lane<T>::kBelow; ++m)
#pragma unroll
    for (int i = 0; i < kPatchLaneRows; ++i)
      a[m][i] = load_eight<T, kE5M2>(shared.a[stage], shared.half[0], lane.row_of(m, i), step, lane.part);
#pragma unroll
  for (int n = 0; n < Lane<T>::kBeside; ++n)
#pragma unroll
    for (int f = 0; f < kPatchFragments; ++f) {
      const int column = lane.column + n * kPatchColumns + f * kFragmentRows;
      const auto b = load_eight<T, false>(shared.b[stage], shared.half[1], column, step, lane.part);
#pragma unroll
      for (int part = 0; part < kPatchParts<Eight<T>>; ++part)  // neighbours do not wait for one another's sums
#pragma unroll
        for (int m = 0; m < Lane<T>::kBelow; ++m) multiply_fragment<kE5M2>(sums[m][n], f, a[m], b, part);
    }
}

// Calls act(below, beside, i, j) for every sum of a lane.
template <class T, class Act>
MOE_DEVICE void for_each_sum(Act act) {
#pragma unroll
  for (int m = 0; m < Lane<T>::kBelow; ++m)
#pragma unroll
    for (int n = 0; n < Lane<T>::kBeside; ++n)
#pragma unroll
      for (int i = 0; i < kPatchLaneRows; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) act(m, n, i, j);
}

// Sums of a block, times its scales, are added in float32 and begin anew.
template <class T>
MOE_DEVICE void promote(const Shared<T>& shared, int stage, int block, const Lane<T>& lane,
                        typename Lane<T>::Sums& of_block, typename Lane<T>::Sums& sums) {
  float of_row[Lane<T>::kBelow][kPatchLaneRows];
#pragma unroll
  for (int m = 0; m < Lane<T>::kBelow; ++m)
#pragma unroll
    for (int i = 0; i < kPatchLaneRows; ++i) of_row[m][i] = shared.scale_a[stage][block][lane.row_of(m, i)];
  float of_column[Lane<T>::kBeside][8];
#pragma unroll
  for (int n = 0; n < Lane<T>::kBeside; ++n)
#pragma unroll
    for (int j = 0; j < 8; ++j) of_column[n][j] = shared.scale_b[stage][block][lane.column_of(n) + j];
  for_each_sum<T>([&](int m, int n, int i, int j) {
    sums[m][n][i][j] = fmaf(of_block[m][n][i][j], of_row[m][i] * of_column[n][j], sums[m][n][i][j]);
    of_block[m][n][i][j] = 0.f;
  });
}

// Calls act with the constants 0 to kCount - 1: which byte of scales an instruction takes is a part of its code.
template <int kCount, int kFirst = 0, class Act>
MOE_DEVICE void for_each_constant(Act act) {
  if constexpr (kFirst < kCount) {
    act(std::integral_constant<int, kFirst>{});
    for_each_constant<kCount, kFirst + 1>(act);
  }
}

// What a lane has of a row of a stage of 128 elements; the scales of a block of its rows, or of its slots of columns.
template <class T>
MOE_DEVICE Bytes32 load_32(const Vec16* stage, int row, int part) {
  return {{stage[place_of<T>(row, part)], stage[place_of<T>(row, part + 4)]}};
}
template <class T>
MOE_DEVICE uint32_t load_scales(const uint8_t* of_block, int row) {
  return *reinterpret_cast<const uint32_t*>(of_block + place_of_scale<T>(row));
}

// Adds the products of a stage of 128 elements, scaled by the instruction.
template <class T>
MOE_DEVICE void multiply_scaled(const Shared<T>& shared, int stage, const Lane<T>& lane,
                                typename Lane<T>::Sums& sums) {
  constexpr int kBelow = Lane<T>::kBelow, kColumns = Lane<T>::kBeside * kPatchFragments;
  const uint32_t scales_a = load_scales<T>(shared.scale_a[stage][lane.part], lane.row);
  const uint32_t scales_b = load_scales<T>(shared.scale_b[stage][lane.part], lane.column);
  Bytes32 a[kBelow];
#pragma unroll
  for (int m = 0; m < kBelow; ++m) a[m] = load_32<T>(shared.a[stage], lane.row_of(m, 0), lane.part);
  const auto load_b = [&](int f) {
    return load_32<T>(shared.b[stage], lane.column + f * kFragmentRows, lane.part);
  };
  Bytes32 b = load_b(0), next = b;
  for_each_constant<kColumns>([&](auto f) {
    if constexpr (f + 1 < kColumns) next = load_b(f + 1);
    for_each_constant<kBelow>([&](auto m) {
      multiply_scaled_fragment<T::kTypes == Types::kE5M2, m, f>(sums[m][f / kPatchFragments], f % kPatchFragments,
                                                                 a[m], scales_a, b, scales_b);
    });
    b = next;
  });
}

// A stage that is loaded. ends_block: of scales, or of the sum.
template <class T>
MOE_DEVICE void multiply_stage(const Shared<T>& shared, int stage, bool ends_block, const Lane<T>& lane,
                               typename Lane<T>::Sums& of_block, typename Lane<T>::Sums& sums) {
  if constexpr (T::kTakesScales) {
    multiply_scaled(shared, stage, lane, sums);
  } else {
#pragma unroll(T::kUnrolledSteps)
    for (int step = 0; step < T::kSteps; ++step) {
      multiply_step(shared, stage, step, lane, T::kBlock ? of_block : sums);
      if constexpr (T::kBlock == kPatchDepth) promote(shared, stage, step, lane, of_block, sums);
    }
    if constexpr (T::kBlock > kPatchDepth)
      if (ends_block) promote(shared, stage, 0, lane, of_block, sums);
  }
}

}  // namespace moe_fp8::mma
