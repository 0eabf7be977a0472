// From the registers of consumers to out.
#pragma once
#include "gemm/sm90/pipeline/consumer.h"

namespace moe_fp8::sm90 {

// A warp's staging holds 16 rows of 128 bytes, in chunks of 16 that are swizzled: columns from 8 * first on. Stored one
// by one: a store of two takes an even register and the next, and sums that lie so share banks of registers with the
// products that are added to them.
template <class Value>
MOE_DEVICE void stage_floats(uint8_t* staging, int lane, int first, int eights, Value& value) {
  const int r = lane / 4, q = lane % 4;
#pragma unroll
  for (int j = 0; j < eights; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint8_t* to = staging + (r + 8 * h) * 128 + ((2 * j + q / 2) ^ r) * 16 + q % 2 * 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) reinterpret_cast<volatile float*>(to)[i] = value(h, first + j, i);
    }
}
// One chunk of every fourth row, when all lanes have staged theirs.
MOE_DEVICE void take_staged(const uint8_t* staging, int line, int chunk, Vec16 (&held)[4]) {
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = 4 * i + line;
    held[i] = *reinterpret_cast<const Vec16*>(staging + r * 128 + (chunk ^ (r & 7)) * 16);
  }
  __syncwarp();
}

// A warp's 16 rows, of 128 of the tile, 128 bytes of columns at a time, by way of shared memory, so that lines of out
// are stored whole. value(h, j, i): of the thread's row `8 h` further, column 8 j + i of its two. kElement: p.element.
template <int kElement, class T, class Value>
MOE_DEVICE void store_tile(const Args& p, const Consumer<T>& c, const Tile& tile, Shared<T>& shared, int half,
                           Value value) {
  constexpr int kColumns = 128 / kElement;
  const int warp = c.warp(), lane = c.lane(), first = 16 * warp + 128 * half, rows = tile.rows - first;
  const int columns = up_to(tile.columns, T::kTileColumns);
  const int line = lane / 8, chunk = lane % 8;  // of 16 bytes
  const int64_t pitch = int64_t(p.N) * kElement;
  uint8_t* out = static_cast<uint8_t*>(p.out) + (tile.row + first + line) * pitch + int64_t(tile.column) * kElement;
  uint8_t* staging = shared.staging[warp];
  const uint32_t stage = shared_address(staging);
#pragma unroll
  for (int piece = 0; piece < ceil_div(T::kTileColumns, kColumns); ++piece) {
    if (piece * kColumns >= columns) break;
    constexpr int kEights = kColumns / 8;  // of columns
    const int eights = up_to(T::kTileColumns / 8 - piece * kEights, kEights);
    if constexpr (kElement == 4) {
      stage_floats(staging, lane, piece * kEights, eights, value);
    } else {
      const int matrix = lane / 8, r = matrix % 2 * 8 + lane % 8;
      auto word = [&](int h, int j) {
        return to_bf16x2(value(h, piece * kEights + j, 0), value(h, piece * kEights + j, 1));
      };
#pragma unroll
      for (int j = 0; j < eights; j += 2)
        store_matrices(stage + r * 128 + ((j + matrix / 2) ^ (r & 7)) * 16, word(0, j), word(1, j), word(0, j + 1),
                       word(1, j + 1));
    }
    Vec16 held[4];
    take_staged(staging, line, chunk, held);
    if (piece * kColumns + chunk * (16 / kElement) < columns) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (4 * i + line < rows)
          *reinterpret_cast<Vec16*>(out + 4 * i * pitch + piece * 128 + chunk * 16) = held[i];
    }
  }
}

}  // namespace moe_fp8::sm90
