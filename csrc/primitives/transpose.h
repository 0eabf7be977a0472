// Transposes rows in registers to columns in memory.
//
// THREAD MAP. A row of threads (one threadIdx.y) is 32 lanes (threadIdx.x) on every chip, so shuffles with masks below
// 32 stay inside it. A row of threads holds 16 rows, and a lane some adjacent columns of them. Cast, the 16 rows of a
// column are one chunk: 16 of the 128 bytes of a line of q_t.
#pragma once
#include "platform/memory.h"
#include "primitives/cast.h"
#include "primitives/groups.h"

namespace moe_fp8 {

constexpr int kLanes = 32, kChunkRows = 16, kLineChunks = kLine / kChunkRows;

// Shared memory for columns of 128 bytes: [column][position]. The eight chunks of a column are permuted, so that banks
// do not conflict: neither in writes (one chunk, 32 lanes with kColumnsPerLane columns each) nor in reads (the 8 chunks
// of a column).
template <int kColumns, int kColumnsPerLane>
struct TransposeStage {
  Vec16 chunks[kColumns * kLineChunks];
  MOE_DEVICE Vec16& at(int column, int chunk) {
    return chunks[column * kLineChunks + (chunk ^ ((column / kColumnsPerLane) & (kLineChunks - 1)))];
  }
};

// Mask of the bytes of word g that are rows: byte i is if 4 * g + i < rows. Padding is then zero even if the scale is
// NaN.
MOE_DEVICE uint32_t row_mask(int g, int rows) {
  const int n = rows - 4 * g;
  return n >= 4 ? 0xffffffffu : n <= 0 ? 0u : (1u << (8 * n)) - 1;
}

// Casts the 16 rows of a row of threads to chunks of columns in the stage. A lane has kWords words of columns;
// multiplier: one per column; cast(a, b, c, d) returns four bytes. kFull: all 16 rows are valid, else `rows` of them.
template <class In, bool kFull, int kWords, class Stage, class Cast>
MOE_DEVICE void cast_chunks(const uint32_t (&v)[kChunkRows][kWords], int rows, const float* multiplier, Stage& stage,
                          Cast cast) {
#pragma unroll
  for (int c = 0; c < kWords * kPerWord<In>; ++c) {
    Vec16 chunk;
    const int column = threadIdx.x * kWords * kPerWord<In> + c, w = c / kPerWord<In>, i = c % kPerWord<In>;
    const float m = multiplier[column];
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      chunk.w[g] = cast(element<In>(v[4 * g][w], i) * m, element<In>(v[4 * g + 1][w], i) * m,
                        element<In>(v[4 * g + 2][w], i) * m, element<In>(v[4 * g + 3][w], i) * m);
      if constexpr (!kFull) chunk.w[g] &= row_mask(g, rows);
    }
    stage.at(column, threadIdx.y % kLineChunks) = chunk;
  }
}

// Transposes 4 x 4 bytes: four words of rows become four words of columns.
MOE_DEVICE void transpose_bytes(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  const uint32_t ab = permute_bytes(a, b, 0x5140), cd = permute_bytes(c, d, 0x5140);  // columns 0 and 1
  const uint32_t ab2 = permute_bytes(a, b, 0x7362), cd2 = permute_bytes(c, d, 0x7362);
  a = permute_bytes(ab, cd, 0x5410);
  b = permute_bytes(ab, cd, 0x7632);
  c = permute_bytes(ab2, cd2, 0x5410);
  d = permute_bytes(ab2, cd2, 0x7632);
}
// Stages 16 rows of a row of threads that are fp8 already. A lane has four columns.
template <class Stage>
MOE_DEVICE void stage_chunks(uint32_t (&v)[kChunkRows], Stage& stage) {
#pragma unroll
  for (int g = 0; g < kChunkRows; g += 4) transpose_bytes(v[g], v[g + 1], v[g + 2], v[g + 3]);
#pragma unroll
  for (int c = 0; c < 4; ++c)
    stage.at(threadIdx.x * 4 + c, threadIdx.y % kLineChunks) = Vec16{{v[c], v[4 + c], v[8 + c], v[12 + c]}};
}

// Stages zeros, for a row of threads that has only padding.
template <int kColumns, class Stage>
MOE_DEVICE void clear_chunks(Stage& stage) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) stage.at(threadIdx.x * kColumns + c, threadIdx.y % kLineChunks) = Vec16{};
}

// Stores a chunk of 16 positions: all of them if kWhole, else the first `valid`.
template <bool kWhole>
MOE_DEVICE void store_chunk(uint8_t* q_t, const Vec16& chunk, int valid) {
  if constexpr (kWhole) {
    store_stream(reinterpret_cast<Vec16*>(q_t), chunk);
  } else {
#pragma unroll
    for (int b = 0; b < kChunkRows; ++b)
      if (b < valid) q_t[b] = uint8_t(chunk.w[b / 4] >> (8 * (b % 4)));
  }
}

}  // namespace moe_fp8
