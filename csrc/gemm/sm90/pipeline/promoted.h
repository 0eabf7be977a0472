// Sums that are promoted: what the tensor cores add up of a stage is scaled, of blocks, and added in float32.
#pragma once
#include "gemm/sm90/pipeline/consumer.h"

namespace moe_fp8::sm90 {

// Where the scales of blocks are in the first stage: of the thread's first row and of its first column. All columns of
// a square have the same.
template <class T>
struct BlockScales {
  uint32_t of_rows, of_columns;

  MOE_DEVICE BlockScales(Shared<T>& shared, const Tile& tile, int row, int lane)
      : of_rows(shared_address(shared.scale_a) + 4 * ((tile.row_of_a & 3) + row)),
        of_columns(shared_address(shared.scale_b) + (T::kColumnScales ? 8 * (lane % 4) : 0)) {}
  MOE_DEVICE void load_rows(int s, int half, float (&row)[2]) const {
    const uint32_t at = of_rows + (s * (T::kTileRows + 4) + 128 * half) * 4;
    row[0] = load_shared(at);
    row[1] = load_shared(at + 8 * 4);
  }
  MOE_DEVICE void load_columns(int s, float (&column)[T::kTileColumns / 4]) const {
    const uint32_t at = of_columns + s * int(sizeof(Shared<T>::scale_b[0]));
    if constexpr (T::kColumnScales) {
#pragma unroll
      for (int i = 0; i < T::kTileColumns / 4; i += 2) load_shared(at + 16 * i, column[i], column[i + 1]);
    } else {
      const float of_all = load_shared(at);
#pragma unroll
      for (float& f : column) f = of_all;
    }
  }
};
// Promoted: products of a stage that is full, of 128 rows of the tile at a time. kHalves: of the tile's rows, those in
// which the warpgroup has any. `behind`: whether to wait for the next stage meanwhile. kRest: it is the last of a tile,
// and `rest` elements of it are its group's.
template <int kHalves, bool kRest, class T>
MOE_DEVICE void promote_stage(const Consumer<T>& c, float (&sum)[2][T::kTileColumns / 2],
                              float (&product)[T::kTileColumns / 2], int s, const BlockScales<T>& scales, bool behind,
                              int rest) {
  constexpr int kSums = T::kTileColumns / 2;
  float column[T::kTileColumns / 4];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    if constexpr (kRest) c.multiply_rest(product, s, half, false, rest);
    else c.multiply(product, s, half, false);
    float scale[kSums];
    if constexpr (T::kBlockScales) {
      float row[2];
      scales.load_rows(s, half, row);
      if (half == 0) scales.load_columns(s, column);
#pragma unroll
      for (int i = 0; i < kSums; ++i) scale[i] = row[i / 2 % 2] * column[i / 4 * 2 + i % 2];
      if (T::kColumnScales) pin_registers(scale);  // multiplied while the tensor cores are busy
    }
    if (half == kHalves - 1 && behind) c.wait_behind(s);
    wgmma_wait<0>();
    pin_registers(product);
    if (half == kHalves - 1) {
      __syncwarp();  // the scales are read as well, by all lanes
      c.release_stage(s);
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      sum[half][i] = T::kBlockScales ? fmaf(product[i], scale[i], sum[half][i]) : sum[half][i] + product[i];
    if (kRest || !T::kBlockScales) pin_registers(sum[half]);  // added now: products that wait for that are spilled
  }
}
template <int kHalves, class T>
MOE_DEVICE void multiply_promoted(Consumer<T>& c, Shared<T>& shared, const Tile& tile,
                                  float (&sum)[2][T::kTileColumns / 2]) {
#pragma unroll
  for (int i = 0; i < T::kTileColumns / 2; ++i) sum[0][i] = sum[1][i] = 0.f;
  const BlockScales<T> scales(shared, tile, c.row(), c.lane());
  float product[T::kTileColumns / 2];
  int left = steps_of<T>(tile);
#pragma unroll 1
  for (; left > kStages; left -= kStages) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) promote_stage<kHalves, false>(c, sum, product, s, scales, true, 0);
    c.phase ^= 1;
  }
  const int rest = T::kSumGroups ? tile.depth % kDepth : 0, whole = rest > 0 ? left - 1 : left;
#pragma unroll
  for (int s = 0; s < kStages; ++s)
    if (s < whole) promote_stage<kHalves, false>(c, sum, product, s, scales, s < kStages - 1, 0);
  if constexpr (T::kSumGroups)
    if (whole < left) promote_stage<kHalves, true>(c, sum, product, whole, scales, whole < kStages - 1, rest);
#pragma unroll
  for (int s = 0; s < kStages; ++s) {
    if (s < left) continue;
    c.release_stage(s);
    if (s < kStages - 1) c.wait_behind(s);
  }
  c.phase ^= 1;
}

}  // namespace moe_fp8::sm90
