// The producer of rows of a that are taken by index. TMA copies boxes only, so warps copy these rows by cp.async.
#pragma once
#include "gemm/sm90/pipeline/producer.h"

namespace moe_fp8::sm90 {

// Called by the kGatherWarps last warps of the producer warpgroup. Of every kSwizzledRows rows of a tile, a warp copies
// kRowsPerWarp, a chunk of 16 bytes per lane. Two warps keep pace with the tensor cores only if a copy takes few
// instructions, so where the rows begin is looked up once per tile.
template <class T>
MOE_DEVICE void gather_rows(const Args& p, SharedStorage<T>& shared) {
  constexpr int kChunks = kRowBytes / 16, kRowsPerWarp = kSwizzledRows / kGatherWarps;
  constexpr int kRowsPerLane = T::kTileM / kSwizzledRows;
  static_assert(kChunks * kRowsPerWarp == 32);
  const int lane = int(threadIdx.x) % 32, warp_row = int(threadIdx.x) / 32 % kGatherWarps * kRowsPerWarp;
  const int lane_row = warp_row + lane / kChunks, lane_byte = lane % kChunks * 16;
  const uint32_t to = shared_address(shared.a) + lane_row * kRowBytes + (lane_byte ^ lane_row * 16);
  const uint32_t stage_full = shared_address(shared.stage_full);
  for_each_stage(p, shared, [&](const Tile& tile, int, int k, int s) {
    if (k == 0) {
      __syncwarp();  // the lanes have read row_source of the previous tile
#pragma unroll 1
      for (int n = lane; n < kRowsPerWarp * kRowsPerLane; n += 32) {
        const int i = warp_row + n / kRowsPerLane, j = n % kRowsPerLane, r = j * kSwizzledRows + i;
        const int64_t row = r < tile.rows ? p.row_index.row(tile.out_row + r) : -1;
        shared.row_source[i][j] = row < 0 ? kNoRow : uint32_t(row * (p.a_row_stride / 16));
      }
      __syncwarp();
    }
    if (k < k_tiles<T>(tile)) {
      const int at_k = k * kTileK + lane_byte;
      const uint8_t* from = p.a_rows + at_k;
      pin_register(from);  // the compiler would add the two up again for every copy
#pragma unroll 1
      for (int j = 0; j < kRowsPerLane; j += 4) {
        const Vec16 source = *reinterpret_cast<const Vec16*>(&shared.row_source[lane_row][j]);
        const uint32_t to_row = to + s * T::kStageBytesA + j * kSwizzledRows * kRowBytes;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          copy_chunk(to_row + i * kSwizzledRows * kRowBytes, from + uint64_t(source.w[i]) * 16,
                     source.w[i] != kNoRow && at_k < p.K);
      }
    }
    barrier_arrive_after_copies(stage_full + 8 * s);
  });
}

}  // namespace moe_fp8::sm90
