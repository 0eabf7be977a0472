// A thread of the consumers: what it waits for, releases and multiplies.
#pragma once
#include "gemm/sm90/pipeline/stages.h"

namespace moe_fp8::sm90 {

template <class T>
struct Consumer {
  const Args& p;
  uint32_t full, phase;  // barriers of the stages, and of the round under way
  uint32_t a, b;         // operands of the first stage
  uint32_t release;      // the barriers of empty stages, in the block of the cluster that this lane tells
  bool tells;            // a lane for each block

  // Kept from tile to tile, what follows from it would take the products' registers.
  static MOE_DEVICE int thread() { return read_thread_index() - 128; }
  static MOE_DEVICE int group() { return thread() / 128; }
  static MOE_DEVICE int warp() { return thread() / 32; }
  static MOE_DEVICE int lane() { return thread() % 32; }
  // Of 128 rows of the tile, the first of the thread's two, which are 8 apart.
  static MOE_DEVICE int row() { return group() * kWgmmaRows + wgmma_row(thread() % 128); }

  MOE_DEVICE Consumer(const Args& p, Shared<T>& shared) : p(p), full(shared_address(shared.full)), phase(0) {
    a = wgmma_operand(shared_address(shared.a) + int(shfl(uint32_t(group()), 0)) * kWgmmaRows * T::kStageDepth);
    b = wgmma_operand(shared_address(shared.b));
    release = in_block(shared_address(shared.empty), lane() & 1);
    tells = lane() < 2;
  }
  MOE_DEVICE void wait_full(int s) const {
    barrier_wait(full + 8 * s, phase);
    if (by_index<T>(p)) stores_before_copies();
  }
  MOE_DEVICE void wait_behind(int s) const {  // for the stage behind s
    barrier_wait(full + 8 * ((s + 1) % kStages), s == kStages - 1 ? phase ^ 1 : phase);
  }
  // By every warp, to both blocks: either copies for both.
  MOE_DEVICE void release_stage(int s) const {
    if (tells) barrier_arrive_in_cluster(release + 8 * s);
  }
  // Begins the products of a stage, or of its first instructions' worth: of the warpgroup's rows from 128 * half of the
  // tile on.
  template <int kSteps = kDepth / kWgmmaDepth, int n>
  MOE_DEVICE void multiply(float (&sum)[n], int s, int half, bool accumulate) const {
    const uint32_t a_of = a + (s * T::kStageBytesA + half * 128 * kDepth) / 16, b_of = b + s * T::kStageBytesB / 16;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      wgmma<T::kE5M2>(sum, a_of + i * kWgmmaStep, b_of + i * kWgmmaStep, accumulate || i > 0);
    wgmma_commit();
  }
  // All products of a stage of which `rest` elements are the group's; what follows is none of it. A branch for each
  // number of instructions, or the compiler puts a wait behind each. On an H200 gradients of [131072, 2048, 1536]
  // for 128 experts of any sizes take 890 us; by whole stages, with zeros written behind the rest, 1,044.
  template <int n>
  MOE_DEVICE void multiply_rest(float (&sum)[n], int s, int half, bool accumulate, int rest) const {
    static_assert(kDepth == 4 * kWgmmaDepth && kSumAlign == kWgmmaDepth);
    switch (rest / kWgmmaDepth) {
      case 1: multiply<1>(sum, s, half, accumulate); return wgmma_wait<0>();
      case 2: multiply<2>(sum, s, half, accumulate); return wgmma_wait<0>();
      default: multiply<3>(sum, s, half, accumulate); return wgmma_wait<0>();
    }
  }
  // A tile in which the warpgroup has nothing to multiply.
  MOE_DEVICE void step_over(int s, int stages) {
    for (; stages > 0; --stages, s = (s + 1) % kStages) {
      wait_full(s);
      __syncwarp();
      release_stage(s);
      if (s == kStages - 1) phase ^= 1;
    }
  }
};

}  // namespace moe_fp8::sm90
