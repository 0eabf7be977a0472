// A thread of the consumers: what it waits for, releases and multiplies.
#pragma once
#include "gemm/sm90/stages.h"

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
    a = wgmma_operand(shared_address(shared.a) + int(shfl(uint32_t(group()), 0)) * kWgmmaRows * kDepth);
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
  // Begins the products of a stage: of the warpgroup's rows from 128 * half of the tile on.
  template <int n>
  MOE_DEVICE void multiply(float (&sum)[n], int s, int half, bool accumulate) const {
    const uint32_t a_of = a + (s * T::kStageBytesA + half * 128 * kDepth) / 16, b_of = b + s * T::kStageBytesB / 16;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDepth / kWgmmaDepth; ++i)
      wgmma<T::kE5M2>(sum, a_of + i * kWgmmaStep, b_of + i * kWgmmaStep, accumulate || i > 0);
    wgmma_commit();
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

// In a tile's last stage, what follows a group of the sum belongs to the next one: zeros instead, by every warpgroup.
template <class T>
MOE_DEVICE void clear_rest(const Consumer<T>& c, Shared<T>& shared, int depth) {
  if (depth % kDepth == 0) return;
  const int s = (ceil_div(depth, kDepth) - 1) % kStages;
  const int first = depth % kDepth / 16, chunks = kDepth / 16 - first;  // of 16 bytes
  c.wait_full(s);
  uint8_t *a = shared.a[s] + c.group() * kWgmmaRows * kDepth, *b = shared.b[s];
#pragma unroll 1
  for (int i = c.thread() % 128; i < (T::kTileRows / 2 + T::kTileColumns) * chunks; i += 128) {
    const int r = i / chunks, row = r < T::kTileColumns ? r : r - T::kTileColumns, chunk = first + i % chunks;
    uint8_t* of_row = r < T::kTileColumns ? b + row * kDepth : a + (row / 64 * 128 + row % 64) * kDepth;
    *reinterpret_cast<Vec16*>(of_row + (chunk ^ (row & 7)) * 16) = Vec16{};
  }
  stores_before_copies();
  barrier_of(c.group(), 128);
}

}  // namespace moe_fp8::sm90
