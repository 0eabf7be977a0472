// From the stages in shared memory to sums in registers.
#pragma once
#include "gemm/mma/pipeline/shared_storage.h"

namespace moe_fp8::mma {

// Maps a lane's sums to rows and columns of the tile: a wave has kPatchesM by kPatchesN patches of platform/mma.h, and
// a lane its share of each.
template <class T>
struct LaneMap {
  static constexpr int kPatchesM = kWaveM / kPatchRows, kPatchesN = T::kWaveN / kPatchColumns;
  using Sums = PatchSums[kPatchesM][kPatchesN];

  int wave_row, wave_column;  // first row and column of the wave
  int row, column;            // first row of a and of b that the lane holds operands of
  int slice;                  // patch_slice(lane)

  MOE_DEVICE LaneMap() {
    const int lane = int(threadIdx.x) % kPatchWave, wave = int(threadIdx.x) / kPatchWave;
    wave_row = wave % 2 * kWaveM;
    wave_column = wave / 2 * T::kWaveN;
    row = wave_row + patch_row(lane);
    column = wave_column + patch_row(lane);
    slice = patch_slice(lane);
  }
  // Row i of the sums of patch m, and the first of eight columns of the sums of patch n.
  MOE_DEVICE int out_row(int m, int i) const { return row + m * kPatchRows + 8 * i; }
  MOE_DEVICE int out_column(int n) const { return wave_column + n * kPatchColumns + 8 * slice; }
};

// Eight elements of a row as the instructions take them.
template <class T>
using MmaOperand = std::conditional_t<T::kTakesFp8, Vec8, Halves4>;

// A lane's operands of one patch along K: eight elements of each of its rows. patch: which one of a stage.
template <class T>
struct Operands {
  Vec8 a[LaneMap<T>::kPatchesM * kPatchLaneRows], b[LaneMap<T>::kPatchesN * kPatchFragments];

  MOE_DEVICE void load(const SharedStorage<T>& shared, int k_tile, int patch, const LaneMap<T>& lane) {
    const int stage = k_tile % T::kStages;
    load_rows<true>(a, patch, chunk_address(shared.a[stage], lane.wave_row));
    load_rows<false>(b, patch, chunk_address(shared.b[stage], lane.wave_column));
  }

 private:
  // Rows a multiple of 8 apart are swizzled alike, so that the distance between their chunks is a constant.
  static MOE_DEVICE auto chunk_address(const Vec16* stage, int first_row) {
    return [=](int row, int chunk, int row_offset, int chunk_offset) {
      return stage + (chunk_index<T>(first_row + row, chunk) ^ chunk_offset) + T::kChunks * row_offset;
    };
  }
};

// Converts step `step` of eight elements to operands of the instructions. half_values: see SharedStorage.
template <class T, bool kE5M2>
MOE_DEVICE MmaOperand<T> to_operand(const Vec8& bytes, int step, const uint16_t* half_values) {
  if constexpr (T::kTakesFp8) {
    return bytes;
  } else {
    Halves4 four;
    if constexpr (T::kUsesTables) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const uint32_t two_bytes = bytes.w[step] >> (16 * pair);
        four.w[pair] = half_values[two_bytes & 0xffu] | uint32_t(half_values[two_bytes >> 8 & 0xffu]) << 16;
      }
    } else {
      fp8x4_to_f16x4<kE5M2>(bytes.w[step], four.w);
    }
    return four;
  }
}

// Adds the products of one patch along K. All sums take one step before the next step, so that no instruction waits for
// the one before it.
template <class T>
MOE_DEVICE void multiply_patches(const Operands<T>& operands, const SharedStorage<T>& shared,
                                 typename LaneMap<T>::Sums& sums) {
  constexpr bool kE5M2 = T::kTypes == Types::kE5M2;
#pragma unroll
  for (int step = 0; step < kPatchSteps<MmaOperand<T>>; ++step) {
    MmaOperand<T> a[LaneMap<T>::kPatchesM][kPatchLaneRows];
#pragma unroll
    for (int i = 0; i < LaneMap<T>::kPatchesM * kPatchLaneRows; ++i)
      a[i / kPatchLaneRows][i % kPatchLaneRows] = to_operand<T, kE5M2>(operands.a[i], step, shared.half_values[0]);
#pragma unroll
    for (int i = 0; i < LaneMap<T>::kPatchesN * kPatchFragments; ++i) {
      const MmaOperand<T> b = to_operand<T, false>(operands.b[i], step, shared.half_values[1]);
#pragma unroll
      for (int m = 0; m < LaneMap<T>::kPatchesM; ++m)
        multiply_fragment<kE5M2>(sums[m][i / kPatchFragments], i % kPatchFragments, a[m], b);
    }
  }
}

// Calls act(m, n, i, j) for every sum of a lane: row i and column j of its share of patch (m, n).
template <class T, class Act>
MOE_DEVICE void for_each_sum(Act act) {
#pragma unroll
  for (int m = 0; m < LaneMap<T>::kPatchesM; ++m)
#pragma unroll
    for (int n = 0; n < LaneMap<T>::kPatchesN; ++n)
#pragma unroll
      for (int i = 0; i < kPatchLaneRows; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) act(m, n, i, j);
}

// Adds the sums of a scaling block, times its scales, to the tile's sums in float32, and clears them.
template <class T>
MOE_DEVICE void promote(const SharedStorage<T>& shared, int k_tile, int block, const LaneMap<T>& lane,
                        typename LaneMap<T>::Sums& block_sums, typename LaneMap<T>::Sums& sums) {
  const int slot = scale_slot<T>(k_tile);
  float row_scale[LaneMap<T>::kPatchesM][kPatchLaneRows];
#pragma unroll
  for (int m = 0; m < LaneMap<T>::kPatchesM; ++m)
#pragma unroll
    for (int i = 0; i < kPatchLaneRows; ++i) row_scale[m][i] = shared.scale_a[slot][block][lane.out_row(m, i)];
  float column_scale[LaneMap<T>::kPatchesN][8];
#pragma unroll
  for (int n = 0; n < LaneMap<T>::kPatchesN; ++n)
#pragma unroll
    for (int j = 0; j < 8; ++j) column_scale[n][j] = shared.scale_b[slot][block][lane.out_column(n) + j];
  for_each_sum<T>([&](int m, int n, int i, int j) {
    sums[m][n][i][j] = fmaf(block_sums[m][n][i][j], row_scale[m][i] * column_scale[n][j], sums[m][n][i][j]);
    block_sums[m][n][i][j] = 0.f;
  });
}

// Calls act with the constants 0 to kCount - 1. Instructions encode which byte of the scales they take.
template <int kCount, int kFirst = 0, class Act>
MOE_DEVICE void for_each_constant(Act act) {
  if constexpr (kFirst < kCount) {
    act(std::integral_constant<int, kFirst>{});
    for_each_constant<kCount, kFirst + 1>(act);
  }
}

// A lane's elements of a row in a stage of 128 elements, and its scales, of rows of a or positions of b.
template <class T>
MOE_DEVICE Bytes32 load_32(const Vec16* stage, int row, int slice) {
  return {{stage[chunk_index<T>(row, slice)], stage[chunk_index<T>(row, slice + 4)]}};
}
template <class T>
MOE_DEVICE uint32_t load_scales(const uint8_t* block_scales, int row) {
  return *reinterpret_cast<const uint32_t*>(block_scales + scale_index<T>(row));
}

// Adds the products of a stage of 128 elements, scaled by the instruction.
template <class T>
MOE_DEVICE void multiply_scaled(const SharedStorage<T>& shared, int k_tile, const LaneMap<T>& lane,
                                typename LaneMap<T>::Sums& sums) {
  const int stage = k_tile % T::kStages, slot = scale_slot<T>(k_tile);
  constexpr int kPatchesM = LaneMap<T>::kPatchesM, kFragments = LaneMap<T>::kPatchesN * kPatchFragments;
  const uint32_t scales_a = load_scales<T>(shared.scale_a[slot][lane.slice], lane.row);
  const uint32_t scales_b = load_scales<T>(shared.scale_b[slot][lane.slice], lane.column);
  Bytes32 a[kPatchesM];
#pragma unroll
  for (int m = 0; m < kPatchesM; ++m) a[m] = load_32<T>(shared.a[stage], lane.out_row(m, 0), lane.slice);
  const auto load_b = [&](int f) {
    return load_32<T>(shared.b[stage], lane.column + f * kFragmentRows, lane.slice);
  };
  Bytes32 b = load_b(0), next = b;
  for_each_constant<kFragments>([&](auto f) {
    if constexpr (f + 1 < kFragments) next = load_b(f + 1);
    for_each_constant<kPatchesM>([&](auto m) {
      multiply_scaled_fragment<T::kTypes == Types::kE5M2, m, f>(sums[m][f / kPatchFragments], f % kPatchFragments,
                                                                 a[m], scales_a, b, scales_b);
    });
    b = next;
  });
}

}  // namespace moe_fp8::mma
