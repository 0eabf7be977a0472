// From rows in registers to columns in memory. A row of threads (threadIdx.y) is 32 lanes (threadIdx.x) on every chip.
// A lane has some neighbouring columns, a row of threads 16 rows, which in a column are a chunk of a line of q_t: 16 of
// 128 bytes. Shuffles with masks below 32 stay inside a row of threads.
#pragma once
#include "platform/memory.h"
#include "primitives/cast.h"
#include "primitives/groups.h"

namespace moe_fp8 {

constexpr int kLanes = 32, kChunkRows = 16, kLineChunks = kLine / kChunkRows;

// Columns on their way out: [column][position], 128 bytes a column, its eight 16-byte chunks permuted so that neither
// the writes (one chunk, 32 lanes of kOfLane columns each) nor the reads (8 chunks of a column) meet in a bank.
template <int kColumns, int kOfLane>
struct TransposeStage {
  Vec16 chunks[kColumns * kLineChunks];
  MOE_DEVICE Vec16& at(int column, int chunk) {
    return chunks[column * kLineChunks + (chunk ^ ((column / kOfLane) & (kLineChunks - 1)))];
  }
};

// Byte i of word g is kept where row 4 * g + i < rows: padding is zero even beside a NaN scale.
MOE_DEVICE uint32_t row_mask(int g, int rows) {
  const int n = rows - 4 * g;
  return n >= 4 ? 0xffffffffu : n <= 0 ? 0u : (1u << (8 * n)) - 1;
}

// The 16 rows of a row of threads, kWords words of columns a lane, cast into chunks of columns: cast(a, b, c, d) gives
// four bytes. kFull: all rows are there.
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

// Four bytes of each of four rows, to four bytes of each of four columns.
MOE_DEVICE void transpose_bytes(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  const uint32_t ab = permute_bytes(a, b, 0x5140), cd = permute_bytes(c, d, 0x5140);  // of columns 0 and 1
  const uint32_t ab2 = permute_bytes(a, b, 0x7362), cd2 = permute_bytes(c, d, 0x7362);
  a = permute_bytes(ab, cd, 0x5410);
  b = permute_bytes(ab, cd, 0x7632);
  c = permute_bytes(ab2, cd2, 0x5410);
  d = permute_bytes(ab2, cd2, 0x7632);
}
// The 16 rows of a row of threads, four bytes of columns a lane, as they are.
template <class Stage>
MOE_DEVICE void stage_chunks(uint32_t (&v)[kChunkRows], Stage& stage) {
#pragma unroll
  for (int g = 0; g < kChunkRows; g += 4) transpose_bytes(v[g], v[g + 1], v[g + 2], v[g + 3]);
#pragma unroll
  for (int c = 0; c < 4; ++c)
    stage.at(threadIdx.x * 4 + c, threadIdx.y % kLineChunks) = Vec16{{v[c], v[4 + c], v[8 + c], v[12 + c]}};
}

// Zeros of a row of threads that holds only padding.
template <int kColumns, class Stage>
MOE_DEVICE void clear_chunks(Stage& stage) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) stage.at(threadIdx.x * kColumns + c, threadIdx.y % kLineChunks) = Vec16{};
}

// A chunk of 16 positions on its way out, the first `there` of them where it is not kWhole.
template <bool kWhole>
MOE_DEVICE void store_chunk(uint8_t* q_t, const Vec16& chunk, int there) {
  if constexpr (kWhole) {
    store_stream(reinterpret_cast<Vec16*>(q_t), chunk);
  } else {
#pragma unroll
    for (int b = 0; b < kChunkRows; ++b)
      if (b < there) q_t[b] = uint8_t(chunk.w[b / 4] >> (8 * (b % 4)));
  }
}

}  // namespace moe_fp8
