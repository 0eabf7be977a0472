// The shared memory of a block, and its layout.
#pragma once
#include "gemm/mma/traits.h"

namespace moe_fp8::mma {

template <class T>
struct SharedStorage {
  Vec16 a[T::kStages][T::kTileM * T::kChunks], b[T::kStages][T::kTileN * T::kChunks];
  typename T::Scale scale_a[T::kScaleSlots][T::kStageScales][T::kBlock ? T::kTileM : 1];
  typename T::Scale scale_b[T::kScaleSlots][T::kStageScales][T::kBlock ? T::kTileN : 1];
  gemm::GroupOffsets groups;
  gemm::Tile tiles[kTileSlots];
  uint16_t half_values[2][256];  // kUsesTables: the bytes of a, and of b, as 16-bit floats
};

// Index of a chunk in a stage, swizzled: rows that are read together lie in different banks.
template <class T>
MOE_DEVICE int chunk_index(int row, int chunk) {
  return row * T::kChunks + (chunk ^ (T::kChunks == 8 ? row >> 1 & 7 : (row >> 1 & 1) << 1 | (row >> 2 & 1)));
}
// Index of the scale of a row of a, or of a position of b, in a scale slot. If instructions take scales, a lane's four
// scales, of rows 16 apart, form a word.
template <class T>
MOE_DEVICE int scale_index(int row) {
  return T::kTakesScales ? row / 64 * 64 + row % 16 * 4 + row / 16 % 4 : row;
}
// The column of the tile whose row of b is stored at a position.
MOE_DEVICE int b_column(int position) {
  return position / kPatchColumns * kPatchColumns + column_of_position(position % kPatchColumns);
}

template <class T>
MOE_DEVICE int scale_slot(int k_tile) { return k_tile / T::kStagesPerScale % T::kScaleSlots; }
template <class T>
MOE_DEVICE int k_tiles(const gemm::Tile& tile) { return ceil_div(tile.k_size, T::kStageK); }

}  // namespace moe_fp8::mma
