// A consumer thread: its place in the tile, and how it waits for, multiplies and releases stages.
#pragma once
#include "gemm/sm90/pipeline/shared_storage.h"

namespace moe_fp8::sm90 {

template <class T>
struct Consumer {
  const Args& p;
  uint32_t stage_full, phase;  // the full barriers, and the parity of the current pass over the ring
  uint32_t a, b;               // wgmma operands of the first stage
  uint32_t stage_empty;        // the empty barriers in the block at which this lane arrives
  bool releases;               // lanes 0 and 1 arrive, one for each block of the cluster

  // Computed anew where they are used: kept from tile to tile, they would take registers from the accumulators.
  static MOE_DEVICE int thread() { return read_thread_index() - 128; }
  static MOE_DEVICE int group() { return thread() / 128; }
  static MOE_DEVICE int warp() { return thread() / 32; }
  static MOE_DEVICE int lane() { return thread() % 32; }
  // The first of the thread's two rows, 8 apart, among 128 rows of the tile.
  static MOE_DEVICE int row() { return group() * kWgmmaRows + wgmma_row(thread() % 128); }

  MOE_DEVICE Consumer(const Args& p, SharedStorage<T>& shared)
      : p(p), stage_full(shared_address(shared.stage_full)), phase(0) {
    a = wgmma_operand(shared_address(shared.a) + int(shfl(uint32_t(group()), 0)) * kWgmmaRows * T::kStageK);
    b = wgmma_operand(shared_address(shared.b));
    stage_empty = cluster_address(shared_address(shared.stage_empty), lane() & 1);
    releases = lane() < 2;
  }
  MOE_DEVICE void wait_stage(int s) const {
    barrier_wait(stage_full + 8 * s, phase);
    if (gathers_rows<T>(p)) fence_async_proxy();
  }
  MOE_DEVICE void wait_next_stage(int s) const {  // the stage after s
    barrier_wait(stage_full + 8 * ((s + 1) % kStages), s == kStages - 1 ? phase ^ 1 : phase);
  }
  // Called by every warp. Arrives in both blocks, because either one copies for both.
  MOE_DEVICE void release_stage(int s) const {
    if (releases) barrier_arrive_in_cluster(stage_empty + 8 * s);
  }
  // Starts kSteps instructions on a stage, for the warpgroup's rows among the 128 rows of `row_half`.
  template <int kSteps = kTileK / kWgmmaDepth, int n>
  MOE_DEVICE void multiply(float (&sum)[n], int s, int row_half, bool accumulate) const {
    const uint32_t stage_a = a + (s * T::kStageBytesA + row_half * 128 * kTileK) / 16;
    const uint32_t stage_b = b + s * T::kStageBytesB / 16;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      wgmma<T::kE5M2>(sum, stage_a + i * kWgmmaStep, stage_b + i * kWgmmaStep, accumulate || i > 0);
    wgmma_commit();
  }
  // Multiplies the first k_tail elements of a group's last stage and waits; the elements behind belong to the next
  // group. Each number of instructions has a branch with a wait, otherwise the compiler waits after every instruction.
  // docs/kernels/gemm.md compares this with whole stages.
  template <int n>
  MOE_DEVICE void multiply_k_tail(float (&sum)[n], int s, int row_half, bool accumulate, int k_tail) const {
    static_assert(kTileK == 4 * kWgmmaDepth && kOffsAlign == kWgmmaDepth);
    switch (k_tail / kWgmmaDepth) {
      case 1: multiply<1>(sum, s, row_half, accumulate); return wgmma_wait<0>();
      case 2: multiply<2>(sum, s, row_half, accumulate); return wgmma_wait<0>();
      default: multiply<3>(sum, s, row_half, accumulate); return wgmma_wait<0>();
    }
  }
  // Passes over the stages of a tile in which the warpgroup has nothing to multiply.
  MOE_DEVICE void skip_stages(int s, int stages) {
    for (; stages > 0; --stages, s = (s + 1) % kStages) {
      wait_stage(s);
      __syncwarp();
      release_stage(s);
      if (s == kStages - 1) phase ^= 1;
    }
  }
};

}  // namespace moe_fp8::sm90
