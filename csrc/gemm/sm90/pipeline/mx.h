// MXFP8, for which Hopper's tensor cores have no scales: rows of a become bfloat16, times their scales, on their way
// from shared memory to registers that the tensor cores read, while these multiply the elements before. b comes as
// bfloat16: both operands so take more of shared memory than it gives. DESIGN section 5 has what else was tried.
#pragma once
#include "gemm/sm90/pipeline/consumer.h"
#include "platform/mma.h"
#include "primitives/operand.h"

namespace moe_fp8::sm90 {

// The thread's part of 32 elements of its two rows: of 16, and of the next.
using MxBlock = uint32_t[2][4];
constexpr int kMxBlocks = 2;  // of a stage

// The warp's 16 rows of a.
template <class T>
class MxRows {
 public:
  MOE_DEVICE MxRows(Shared<T>& shared, int warp, int lane) {
    static_assert(T::kStageDepth == kMxBlocks * kMxBlock);
    const int named = 16 * warp + lane % 16, row = 16 * warp + lane / 4;
    chunk_ = shared_address(shared.a) + named * T::kStageDepth + (lane / 16 ^ named / 2 % 4) * 16;
    scales_ = shared_address(shared.scale_a) + row % 32 * 16 + row / 32 * 4;
  }
  // Of two stages, of which s is the first.
  MOE_DEVICE void load_scales(int s) {
#pragma unroll
    for (int h = 0; h < 2; ++h)  // rows 8 apart are of the same 32
      scale_[h] = as_bits(load_shared(scales_ + s * int(sizeof(Shared<T>::scale_a[0])) + h * 8 * 16));
  }
  // Block `block` of stage s.
  MOE_DEVICE void load(MxBlock& to, int s, int block) const {
    uint32_t w[4];
    load_matrices(w, (chunk_ + s * T::kStageBytesA) ^ block * kMxBlock);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = e8m0_to_float(uint8_t(scale_[h] >> 8 * (s % 2 * kMxBlocks + block)));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto value = [&](int byte) { return decode_native<false>(w[2 * i + h], byte) * scale; };
        to[i][h] = to_bf16x2(value(0), value(1));
        to[i][2 + h] = to_bf16x2(value(2), value(3));
      }
    }
  }

 private:
  uint32_t chunk_, scales_;  // of the first stage
  uint32_t scale_[2];        // of four blocks
};

template <class T, int n>
MOE_DEVICE void multiply_block(const Consumer<T>& c, float (&sum)[n], const MxBlock& a, int s, int block,
                               bool accumulate) {
  const uint32_t b = c.b + (s * T::kStageBytesB + block * kMxBlock * T::kBytesB) / 16;
  wgmma_fence();
  wgmma_bf16(sum, a[0], b, accumulate);
  wgmma_bf16(sum, a[1], b + kWgmmaStep, true);
  wgmma_commit();
}
// Rounds of which every block is the tile's. One block becomes bfloat16 while another one is multiplied; `a` holds the
// first, and in the end the first behind them, if there is more.
template <class T, int n>
MOE_DEVICE void multiply_mx_rounds(Consumer<T>& c, MxRows<T>& rows, float (&sum)[n], MxBlock& a, int rounds,
                                   bool more) {
  MxBlock other;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    const bool last = round == rounds - 1 && !more;
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      multiply_block(c, sum, a, s, 0, round > 0 || s > 0);
      wgmma_wait<1>();
      __syncwarp();  // other lanes' reads of the stage come before its release
      if (s > 0) c.release_stage(s - 1);
      else if (round > 0) c.release_stage(kStages - 1);
      rows.load(other, s, 1);
      multiply_block(c, sum, other, s, 1, true);
      wgmma_wait<1>();
      const bool ahead = s < kStages - 1 || !last;
      if (ahead) {
        c.wait_behind(s);
        if (s % 2 == 1) rows.load_scales((s + 1) % kStages);
      }
      rows.load(a, ahead ? (s + 1) % kStages : s, 0);  // for nothing, rather than a branch while products are under way
    }
    c.phase ^= 1;
  }
  wgmma_wait<0>();
  __syncwarp();
  c.release_stage(kStages - 1);
}
// The last round, which ends within the tile's.
template <class T, int n>
MOE_DEVICE void multiply_mx_rest(Consumer<T>& c, MxRows<T>& rows, float (&sum)[n], MxBlock& a, int blocks, bool begun) {
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) {
    if (s > 0) c.wait_full(s);
    if (s % 2 == 0 && s > 0) rows.load_scales(s);
    for (int block = 0; block < up_to(blocks - s * kMxBlocks, kMxBlocks); ++block) {
      if (s + block > 0) rows.load(a, s, block);
      multiply_block(c, sum, a, s, block, begun || s + block > 0);
      wgmma_wait<0>();
    }
    __syncwarp();
    c.release_stage(s);
  }
  c.phase ^= 1;
}
template <class T, int n>
MOE_DEVICE void multiply_mx(Consumer<T>& c, Shared<T>& shared, const Tile& tile, float (&sum)[n]) {
  constexpr int kOfRound = kStages * kMxBlocks;
  const int blocks = ceil_div(tile.depth, kMxBlock), rounds = blocks / kOfRound, rest = blocks % kOfRound;
  MxRows<T> rows(shared, c.warp(), c.lane());
  MxBlock a;
  rows.load_scales(0);
  rows.load(a, 0, 0);
  if (rounds > 0) multiply_mx_rounds(c, rows, sum, a, rounds, rest > 0);
  if (rest > 0) multiply_mx_rest(c, rows, sum, a, rest, rounds > 0);
  pin_registers(sum);
}

}  // namespace moe_fp8::sm90
