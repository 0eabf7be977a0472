// The main loop of MXFP8. Hopper's tensor cores apply no block scales, so they multiply bfloat16: consumers load rows
// of a from shared memory, convert them, times their scales, and pass them in registers, while the tensor cores
// multiply the elements before. b was dequantized before the launch: with both operands converted, shared memory is too
// slow. docs/kernels/gemm.md compares the alternatives.
#pragma once
#include "gemm/sm90/pipeline/consumer.h"
#include "platform/mma.h"
#include "primitives/operand.h"

namespace moe_fp8::sm90 {

// A thread's share of 32 elements of a, in bfloat16: two instructions of 16 elements.
using MxBlock = uint32_t[2][4];
constexpr int kMxBlocks = 2;  // scaling blocks in a stage

// Loads the warp's 16 rows of a.
template <class T>
class MxRows {
 public:
  MOE_DEVICE MxRows(SharedStorage<T>& shared, int warp, int lane) {
    static_assert(T::kStageK == kMxBlocks * kMxBlock);
    const int matrix_row = 16 * warp + lane % 16, row = 16 * warp + lane / 4;  // the row ldmatrix reads; of the result
    chunk_ = shared_address(shared.a) + matrix_row * T::kStageK + (lane / 16 ^ matrix_row / 2 % 4) * 16;
    scales_ = shared_address(shared.scale_a) + row % 32 * 16 + row / 32 * 4;
  }
  // Loads the scales of stages s and s + 1; s is even.
  MOE_DEVICE void load_scales(int s) {
#pragma unroll
    for (int h = 0; h < 2; ++h)  // the thread's rows are 8 apart, among the same 32
      scale_[h] = as_bits(load_shared(scales_ + s * int(sizeof(SharedStorage<T>::scale_a[0])) + h * 8 * 16));
  }
  // Loads and converts block `block` of stage s.
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
  uint32_t chunk_, scales_;  // addresses in the first stage
  uint32_t scale_[2];        // per row: the bytes of four blocks
};

template <class T, int n>
MOE_DEVICE void multiply_block(const Consumer<T>& c, float (&sum)[n], const MxBlock& a, int s, int block,
                               bool accumulate) {
  const uint32_t b = c.b + (s * T::kStageBytesB + block * kMxBlock * T::kElementBytesB) / 16;
  wgmma_fence();
  wgmma_bf16(sum, a[0], b, accumulate);
  wgmma_bf16(sum, a[1], b + kWgmmaStep, true);
  wgmma_commit();
}
// Passes over the ring whose blocks all hold data. One block is converted while another one is multiplied. `a` holds
// the first block, and afterwards the first block behind these passes if `more`.
template <class T, int n>
MOE_DEVICE void multiply_mx_passes(Consumer<T>& c, MxRows<T>& rows, float (&sum)[n], MxBlock& a, int passes,
                                   bool more) {
  MxBlock other;
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    const bool last = pass == passes - 1 && !more;
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      multiply_block(c, sum, a, s, 0, pass > 0 || s > 0);
      wgmma_wait<1>();
      __syncwarp();  // all lanes have read the stage that is released
      if (s > 0) c.release_stage(s - 1);
      else if (pass > 0) c.release_stage(kStages - 1);
      rows.load(other, s, 1);
      multiply_block(c, sum, other, s, 1, true);
      wgmma_wait<1>();
      const bool has_next = s < kStages - 1 || !last;
      if (has_next) {
        c.wait_next_stage(s);
        if (s % 2 == 1) rows.load_scales((s + 1) % kStages);
      }
      // Without a next block this load is useless, but a branch would have to wait for the products in flight.
      rows.load(a, has_next ? (s + 1) % kStages : s, 0);
    }
    c.phase ^= 1;
  }
  wgmma_wait<0>();
  __syncwarp();
  c.release_stage(kStages - 1);
}
// The last pass. Only its first `blocks` blocks hold data.
template <class T, int n>
MOE_DEVICE void multiply_mx_tail(Consumer<T>& c, MxRows<T>& rows, float (&sum)[n], MxBlock& a, int blocks,
                                 bool accumulate) {
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) {
    if (s > 0) c.wait_stage(s);
    if (s % 2 == 0 && s > 0) rows.load_scales(s);
    for (int block = 0; block < up_to(blocks - s * kMxBlocks, kMxBlocks); ++block) {
      if (s + block > 0) rows.load(a, s, block);
      multiply_block(c, sum, a, s, block, accumulate || s + block > 0);
      wgmma_wait<0>();
    }
    __syncwarp();
    c.release_stage(s);
  }
  c.phase ^= 1;
}
template <class T, int n>
MOE_DEVICE void multiply_mx(Consumer<T>& c, SharedStorage<T>& shared, const Tile& tile, float (&sum)[n]) {
  constexpr int kBlocksPerPass = kStages * kMxBlocks;
  const int blocks = ceil_div(tile.k_size, kMxBlock), passes = blocks / kBlocksPerPass, tail = blocks % kBlocksPerPass;
  MxRows<T> rows(shared, c.warp(), c.lane());
  MxBlock a;
  rows.load_scales(0);
  rows.load(a, 0, 0);
  if (passes > 0) multiply_mx_passes(c, rows, sum, a, passes, tail > 0);
  if (tail > 0) multiply_mx_tail(c, rows, sum, a, tail, passes > 0);
  pin_registers(sum);
}

}  // namespace moe_fp8::sm90
