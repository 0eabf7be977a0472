// The main loop of promoted sums: the tensor cores accumulate one stage at a time, and its sums, times the block scales
// if there are any, are added in float32.
#pragma once
#include "gemm/sm90/pipeline/consumer.h"

namespace moe_fp8::sm90 {

// Addresses of block scales in the first stage: of the thread's first row and first column. All columns of a square
// share one scale.
template <class T>
struct BlockScales {
  uint32_t row_scales, column_scales;

  MOE_DEVICE BlockScales(SharedStorage<T>& shared, const Tile& tile, int row, int lane)
      : row_scales(shared_address(shared.scale_a) + 4 * ((tile.a_row & 3) + row)),
        column_scales(shared_address(shared.scale_b) + (T::kColumnScales ? 8 * (lane % 4) : 0)) {}
  MOE_DEVICE void load_rows(int s, int row_half, float (&row)[2]) const {
    const uint32_t at = row_scales + (s * (T::kTileM + 4) + 128 * row_half) * 4;
    row[0] = load_shared(at);
    row[1] = load_shared(at + 8 * 4);
  }
  MOE_DEVICE void load_columns(int s, float (&column)[T::kTileN / 4]) const {
    const uint32_t at = column_scales + s * int(sizeof(SharedStorage<T>::scale_b[0]));
    if constexpr (T::kColumnScales) {
#pragma unroll
      for (int i = 0; i < T::kTileN / 4; i += 2) load_shared(at + 16 * i, column[i], column[i + 1]);
    } else {
      const float square = load_shared(at);
#pragma unroll
      for (float& f : column) f = square;
    }
  }
};
// Multiplies a full stage, 128 rows of the tile at a time, and promotes the sums. kRowHalves: how many of the two row
// halves contain rows of the warpgroup. await_next: wait for the next stage while the last products are in flight.
// kTail: only the first k_tail elements of the stage belong to the tile's group.
template <int kRowHalves, bool kTail, class T>
MOE_DEVICE void promote_stage(const Consumer<T>& c, float (&sum)[2][T::kTileN / 2], float (&product)[T::kTileN / 2],
                              int s, const BlockScales<T>& scales, bool await_next, int k_tail) {
  constexpr int kSums = T::kTileN / 2;
  float column[T::kTileN / 4];
#pragma unroll
  for (int row_half = 0; row_half < kRowHalves; ++row_half) {
    if constexpr (kTail) c.multiply_k_tail(product, s, row_half, false, k_tail);
    else c.multiply(product, s, row_half, false);
    float scale[kSums];
    if constexpr (T::kBlockScales) {
      float row[2];
      scales.load_rows(s, row_half, row);
      if (row_half == 0) scales.load_columns(s, column);
#pragma unroll
      for (int i = 0; i < kSums; ++i) scale[i] = row[i / 2 % 2] * column[i / 4 * 2 + i % 2];
      if (T::kColumnScales) pin_registers(scale);  // multiply the scales while the tensor cores are busy
    }
    if (row_half == kRowHalves - 1 && await_next) c.wait_next_stage(s);
    wgmma_wait<0>();
    pin_registers(product);
    if (row_half == kRowHalves - 1) {
      __syncwarp();  // all lanes have read the scales too
      c.release_stage(s);
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      sum[row_half][i] = T::kBlockScales ? fmaf(product[i], scale[i], sum[row_half][i]) : sum[row_half][i] + product[i];
    if (kTail || !T::kBlockScales) pin_registers(sum[row_half]);  // add now: products that wait would be spilled
  }
}
template <int kRowHalves, class T>
MOE_DEVICE void multiply_promoted(Consumer<T>& c, SharedStorage<T>& shared, const Tile& tile,
                                  float (&sum)[2][T::kTileN / 2]) {
#pragma unroll
  for (int i = 0; i < T::kTileN / 2; ++i) sum[0][i] = sum[1][i] = 0.f;
  const BlockScales<T> scales(shared, tile, c.row(), c.lane());
  float product[T::kTileN / 2];
  int left = k_tiles<T>(tile);
#pragma unroll 1
  for (; left > kStages; left -= kStages) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) promote_stage<kRowHalves, false>(c, sum, product, s, scales, true, 0);
    c.phase ^= 1;
  }
  const int k_tail = T::kKGrouped ? tile.k_size % kTileK : 0, whole_stages = k_tail > 0 ? left - 1 : left;
#pragma unroll
  for (int s = 0; s < kStages; ++s)
    if (s < whole_stages) promote_stage<kRowHalves, false>(c, sum, product, s, scales, s < kStages - 1, 0);
  if constexpr (T::kKGrouped)
    if (whole_stages < left)
      promote_stage<kRowHalves, true>(c, sum, product, whole_stages, scales, whole_stages < kStages - 1, k_tail);
#pragma unroll
  for (int s = 0; s < kStages; ++s) {  // padding
    if (s < left) continue;
    c.release_stage(s);
    if (s < kStages - 1) c.wait_next_stage(s);
  }
  c.phase ^= 1;
}

}  // namespace moe_fp8::sm90
