#include "quantize/transpose_weight.h"

#include "platform/launch.h"
#include "primitives/transpose.h"

namespace moe_fp8 {
namespace {

// THREAD MAP. A block transposes tiles of 128 x 128 bytes of expert blockIdx.y. A row of threads loads 16 rows of a
// tile, and a lane four columns of them: 32 lanes read a line of 128 bytes. Eight lanes then store a column of 128
// bytes, 16 bytes each.
constexpr int kThreads = kLanes * kLineChunks, kColumns = 4, kResidentBlocks = 4;
static_assert(kLanes * kColumns == kLine);

// Loads the four bytes from column `column` on of the 16 rows from row `row` on. Bytes outside of q are zero.
// kWords: rows begin at multiples of four bytes, and K is one.
template <bool kWords>
MOE_DEVICE void load_rows(const TransposeWeightParams& p, const uint8_t* q, int64_t row, int64_t column,
                          uint32_t (&v)[kChunkRows]) {
#pragma unroll
  for (int r = 0; r < kChunkRows; ++r) {
    v[r] = 0;
    if (row + r >= p.N) continue;
    const uint8_t* from = q + (row + r) * p.row_stride + column;
    if constexpr (kWords) {
      if (column < p.K) v[r] = load_stream(reinterpret_cast<const uint32_t*>(from));
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
        if (column + i < p.K) v[r] |= uint32_t(load_stream(from + i)) << (8 * i);
    }
  }
}

// Tiles of an expert are fewer than 2^32, because 2^45 bytes fit in no memory: the division below is short.
MOE_HD uint32_t tiles_of_expert(const TransposeWeightParams& p) {
  return uint32_t(ceil_div<int64_t>(p.N, kLine) * ceil_div<int64_t>(p.K, kLine));
}

// kWords: as in load_rows(). kWhole: columns of q_t begin at multiples of 16 bytes, and N is one.
template <bool kWords, bool kWhole>
MOE_GLOBAL void MOE_LAUNCH_BOUNDS(kThreads, kResidentBlocks)
    transpose_weight_kernel(MOE_GRID_CONSTANT const TransposeWeightParams p) {
  __shared__ TransposeStage<kLine, kColumns> stage;
  const uint32_t tiles = tiles_of_expert(p), column_tiles = uint32_t(ceil_div<int64_t>(p.K, kLine));
  const int64_t e = blockIdx.y;
  const int thread = threadIdx.y * kLanes + threadIdx.x, chunk = thread % kLineChunks;
  wait_for_previous_kernel();
  for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const uint32_t row_tile = tile / column_tiles;
    const int64_t row = int64_t(row_tile) * kLine, column = int64_t(tile - row_tile * column_tiles) * kLine;
    uint32_t v[kChunkRows];
    load_rows<kWords>(p, p.q + e * p.expert_stride, row + threadIdx.y * kChunkRows, column + threadIdx.x * kColumns, v);
    stage_chunks(v, stage);
    __syncthreads();
    const int64_t first = row + chunk * kChunkRows;
    const int valid = first >= p.N ? 0 : p.N - first < kChunkRows ? int(p.N - first) : kChunkRows;
#pragma unroll
    for (int i = 0; i < kLine; i += kThreads / kLineChunks) {
      const int c = i + thread / kLineChunks;
      if (valid > 0 && column + c < p.K)
        store_chunk<kWhole>(p.q_t + (e * p.K + column + c) * p.N + first, stage.at(c, chunk), valid);
    }
    __syncthreads();  // the next tile overwrites the stage
  }
}

}  // namespace

int transpose_weight(const TransposeWeightParams& p, void* stream) {
  if (p.E * p.N * p.K == 0) return 0;
  const int64_t tiles = tiles_of_expert(p), most = max_grid_blocks(kThreads) / p.E;
  const bool words = ((reinterpret_cast<uintptr_t>(p.q) | p.expert_stride | p.row_stride | p.K) & 3) == 0;
  const bool whole = ((reinterpret_cast<uintptr_t>(p.q_t) | p.N) & 15) == 0;
  const auto kernel = words && whole ? transpose_weight_kernel<true, true>
                      : words        ? transpose_weight_kernel<true, false>
                      : whole        ? transpose_weight_kernel<false, true>
                                     : transpose_weight_kernel<false, false>;
  const dim3 grid(unsigned(tiles < most ? tiles : most), unsigned(p.E));
  return launch(kernel, {grid, dim3(kLanes, kLineChunks), stream}, p);
}

}  // namespace moe_fp8
