// From the stages in shared memory to sums in registers.
#pragma once
#include "gemm/mma/tiles.h"

namespace moe_fp8::mma {

// A lane's share of a tile: patches below and beside one another.
template <class T>
struct Lane {
  static constexpr int kBelow = kWaveRows / kPatchRows, kBeside = T::kWaveColumns / kPatchColumns;
  using Sums = PatchSums[kBelow][kBeside];

  int first_row, first_column;  // of the wave, in the tile
  int row, column;              // the first of those that the lane has rows of operands of
  int part;

  MOE_DEVICE Lane() {
    const int lane = int(threadIdx.x) % kPatchWave, wave = int(threadIdx.x) / kPatchWave;
    first_row = wave % 2 * kWaveRows;
    first_column = wave / 2 * T::kWaveColumns;
    row = first_row + patch_row(lane);
    column = first_column + patch_row(lane);
    part = patch_part(lane);
  }
  // Of sums: rows and first columns.
  MOE_DEVICE int row_of(int below, int i) const { return row + below * kPatchRows + 8 * i; }
  MOE_DEVICE int column_of(int beside) const {
    return first_column + beside * kPatchColumns + 8 * part;
  }
};

// What an instruction takes of eight elements of a row.
template <class T>
using Part = std::conditional_t<T::kMultipliesBytes, Vec8, Halves4>;

// What a lane has of a patch's depth: of each of its rows, eight elements. Which of a stage: patch.
template <class T>
struct Operands {
  Vec8 a[Lane<T>::kBelow * kPatchLaneRows], b[Lane<T>::kBeside * kPatchFragments];

  MOE_DEVICE void load(const Shared<T>& shared, int step, int patch, const Lane<T>& lane) {
    const int stage = step % T::kStages;
    load_rows<true>(a, patch, chunks_of(shared.a[stage], lane.first_row));
    load_rows<false>(b, patch, chunks_of(shared.b[stage], lane.first_column));
  }

 private:
  // Chunks of rows that are a multiple of 8 apart lie in like places, so that the distance is a constant.
  static MOE_DEVICE auto chunks_of(const Vec16* stage, int first_row) {
    return [=](int row, int chunk, int further, int first_chunk) {
      return stage + (place_of<T>(first_row + row, chunk) ^ first_chunk) + T::kChunks * further;
    };
  }
};

// A part of eight elements as the instructions take it. half: what bytes stand for.
template <class T, bool kE5M2>
MOE_DEVICE Part<T> part_of(const Vec8& bytes, int part, const uint16_t* half) {
  if constexpr (T::kMultipliesBytes) {
    return bytes;
  } else {
    Halves4 four;
    if constexpr (T::kLooksUp) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const uint32_t bytes_of = bytes.w[part] >> (16 * pair);
        four.w[pair] = half[bytes_of & 0xffu] | uint32_t(half[bytes_of >> 8 & 0xffu]) << 16;
      }
    } else {
      fp8x4_to_f16x4<kE5M2>(bytes.w[part], four.w);
    }
    return four;
  }
}

// Adds the products of 32 elements. All sums take one part before the next: none waits for the one before.
template <class T>
MOE_DEVICE void multiply_patches(const Operands<T>& operands, const Shared<T>& shared, typename Lane<T>::Sums& sums) {
  constexpr bool kE5M2 = T::kTypes == Types::kE5M2;
#pragma unroll
  for (int part = 0; part < kPatchParts<Part<T>>; ++part) {
    Part<T> a[Lane<T>::kBelow][kPatchLaneRows];
#pragma unroll
    for (int i = 0; i < Lane<T>::kBelow * kPatchLaneRows; ++i)
      a[i / kPatchLaneRows][i % kPatchLaneRows] = part_of<T, kE5M2>(operands.a[i], part, shared.half[0]);
#pragma unroll
    for (int i = 0; i < Lane<T>::kBeside * kPatchFragments; ++i) {
      const Part<T> b = part_of<T, false>(operands.b[i], part, shared.half[1]);
#pragma unroll
      for (int m = 0; m < Lane<T>::kBelow; ++m)
        multiply_fragment<kE5M2>(sums[m][i / kPatchFragments], i % kPatchFragments, a[m], b);
    }
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
MOE_DEVICE void promote(const Shared<T>& shared, int step, int block, const Lane<T>& lane,
                        typename Lane<T>::Sums& of_block, typename Lane<T>::Sums& sums) {
  const int stage = place_of_scales<T>(step);
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

// What a lane has of a row of a stage of 128 elements; the scales of a block of its rows, or of its positions of b.
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
MOE_DEVICE void multiply_scaled(const Shared<T>& shared, int step, const Lane<T>& lane,
                                typename Lane<T>::Sums& sums) {
  const int stage = step % T::kStages, of_scales = place_of_scales<T>(step);
  constexpr int kBelow = Lane<T>::kBelow, kColumns = Lane<T>::kBeside * kPatchFragments;
  const uint32_t scales_a = load_scales<T>(shared.scale_a[of_scales][lane.part], lane.row);
  const uint32_t scales_b = load_scales<T>(shared.scale_b[of_scales][lane.part], lane.column);
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

}  // namespace moe_fp8::mma
