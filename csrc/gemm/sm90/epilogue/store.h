// The epilogue that writes out, in bfloat16 or float32. docs/kernels/gemm.md says what an epilogue policy provides.
#pragma once
#include "gemm/sm90/epilogue/staging.h"

namespace moe_fp8::sm90 {

struct Store {
  static constexpr bool kServesMGrouped = true, kServesKGrouped = true, kAddsLowRank = false;
  struct Args {};
  static Args make_args(const ScaledGroupedMmParams&) { return {}; }
  template <class T>
  using Storage = Staging;

  template <class T>
  static MOE_DEVICE void prefetch_tile(const typename T::KernelArgs&, const Consumer<T>&, const Tile&) {}

  template <class T, class Value>
  static MOE_DEVICE void finish_tile(const typename T::KernelArgs& p, const Consumer<T>& c, const Tile& tile,
                                     SharedStorage<T>& shared, int row_half, Value value) {
    if (T::kKGrouped && p.out_transposed) return store_transposed<T>(p, c, tile, shared, row_half, value);
    if (p.out_bytes == 4) store_tile<4, T>(p, c, tile, shared, row_half, value);
    else store_tile<2, T>(p, c, tile, shared, row_half, value);
  }

  // Zeros, even if the scales of an empty sum are not finite.
  template <class T>
  static MOE_DEVICE void finish_empty_tile(const typename T::KernelArgs& p, const Consumer<T>& c, const Tile& tile,
                                           SharedStorage<T>& shared) {
    for (int row_half = 0; row_half < T::kTileM / 128; ++row_half)
      finish_tile<T>(p, c, tile, shared, row_half, [](int, int, int) { return 0.f; });
  }

  // Zeros in the rows behind the last group.
  template <class T>
  static MOE_DEVICE void clear_tail(const typename T::KernelArgs& p, const gemm::GroupOffsets& groups) {
    const int64_t row_bytes = int64_t(p.N) * p.out_bytes, begin = groups.offsets[p.E] * row_bytes;
    const int64_t end = p.M * row_bytes, step = int64_t(gridDim.x) * 128 * kConsumers * 16;
    auto* out = static_cast<uint8_t*>(p.out);
    for (int64_t at = begin + (int64_t(blockIdx.x) * 128 * kConsumers + threadIdx.x - 128) * 16; at < end; at += step)
      *reinterpret_cast<Vec16*>(out + at) = Vec16{};
  }

 private:
  // A warp stores its 16 rows, 128 bytes of columns at a time, by way of shared memory, so that whole cache lines of
  // out are written.
  template <int kElement, class T, class Value>
  static MOE_DEVICE void store_tile(const typename T::KernelArgs& p, const Consumer<T>& c, const Tile& tile,
                                    SharedStorage<T>& shared, int row_half, Value value) {
    constexpr int kColumns = 128 / kElement;
    const int warp = c.warp(), lane = c.lane(), first_row = 16 * warp + 128 * row_half, rows = tile.rows - first_row;
    const int columns = up_to(tile.columns, T::kTileN);
    const int line = lane / 8, chunk = lane % 8;  // the lane's rows, line + 4 i, and 16 of their 128 bytes
    const int64_t pitch = int64_t(p.N) * kElement;
    uint8_t* out = static_cast<uint8_t*>(p.out) + (tile.out_row + first_row + line) * pitch +
                   int64_t(tile.column) * kElement;
    uint8_t* staged = shared.epilogue.rows[warp];
    const uint32_t staged_address = shared_address(staged);
#pragma unroll
    for (int slice = 0; slice < ceil_div(T::kTileN, kColumns); ++slice) {
      if (slice * kColumns >= columns) break;
      constexpr int kEights = kColumns / 8;  // groups of 8 columns
      const int eights = up_to(T::kTileN / 8 - slice * kEights, kEights);
      if constexpr (kElement == 4) {
        stage_floats(staged, lane, slice * kEights, eights, value);
      } else {
        const int matrix = lane / 8, r = matrix % 2 * 8 + lane % 8;
        auto word = [&](int h, int j) {
          return to_bf16x2(value(h, slice * kEights + j, 0), value(h, slice * kEights + j, 1));
        };
#pragma unroll
        for (int j = 0; j < eights; j += 2)
          store_matrices(staged_address + r * 128 + ((j + matrix / 2) ^ (r & 7)) * 16, word(0, j), word(1, j),
                         word(0, j + 1), word(1, j + 1));
      }
      Vec16 chunks[4];
      read_staged(staged, line, chunk, chunks);
      if (slice * kColumns + chunk * (16 / kElement) < columns) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (4 * i + line < rows)
            *reinterpret_cast<Vec16*>(out + 4 * i * pitch + slice * 128 + chunk * 16) = chunks[i];
      }
    }
  }

  // A warp stores its 16 rows in bfloat16, 64 columns at a time: 32 bytes of each column, because the other rows of the
  // tile belong to other warps.
  template <class T, class Value>
  static MOE_DEVICE void store_transposed(const typename T::KernelArgs& p, const Consumer<T>& c, const Tile& tile,
                                          SharedStorage<T>& shared, int row_half, Value value) {
    constexpr int kColumns = 64, kEights = kColumns / 8;
    const int warp = c.warp(), lane = c.lane(), first_row = 16 * warp + 128 * row_half;
    const int columns = first_row < tile.rows ? up_to(tile.columns, T::kTileN) : 0;  // rows are a multiple of 16
    const int half = lane % 2, first = lane / 2;  // the lane's columns, first + 16 i, and which 8 of the rows
    const int64_t pitch = int64_t(p.M) * 2;
    uint8_t* out = static_cast<uint8_t*>(p.out) + (int64_t(tile.expert) * p.N + tile.column + first) * pitch +
                   (tile.a_row + first_row + 8 * half) * 2;
    uint8_t* staged = shared.epilogue.rows[warp];
    const uint32_t staged_address = shared_address(staged);
#pragma unroll
    for (int slice = 0; slice < ceil_div(T::kTileN, kColumns); ++slice) {
      if (slice * kColumns >= columns) break;
      const auto word = [&](int h, int j) {
        return to_bf16x2(value(h, slice * kEights + j, 0), value(h, slice * kEights + j, 1));
      };
      const int matrix = lane / 8;
#pragma unroll
      for (int j = 0; j < up_to(T::kTileN / 8 - slice * kEights, kEights); j += 2)
        store_matrices_transposed(staged_address + transposed_chunk(8 * (j + matrix / 2) + lane % 8, matrix % 2) * 16,
                                  word(0, j), word(1, j), word(0, j + 1), word(1, j + 1));
      Vec16 chunks[4];
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        chunks[i] = *reinterpret_cast<const Vec16*>(staged + transposed_chunk(first + 16 * i, half) * 16);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (slice * kColumns + first + 16 * i < columns)
          *reinterpret_cast<Vec16*>(out + (slice * kColumns + 16 * i) * pitch) = chunks[i];
    }
  }
};

}  // namespace moe_fp8::sm90
