// Communication between the lanes of a wave: a warp on NVIDIA's chips, a wavefront on AMD's.
#pragma once
#include <cstdint>

#include "platform/bits.h"

namespace moe_fp8 {

// kWarpSize is for device code only: one host binary may serve both sizes, so host code uses kMinWarpSize and
// kMaxWarpSize.
#if defined(MOE_SIMT)
constexpr int kWarpSize = SIMT_WARP;
#elif defined(MOE_HIP) && defined(__GFX9__)
constexpr int kWarpSize = 64;
#else
constexpr int kWarpSize = 32;
#endif

constexpr int kMinWarpSize = 32;
// What the vendors name differently. LaneMask: one bit per lane; bits beyond the lanes of the wave are zero.
// wave_barrier() orders shared memory within a wave: after it, all lanes see what lanes wrote before it.
#if defined(MOE_HIP)
constexpr int kMaxWarpSize = 64;
using LaneMask = uint64_t;
MOE_DEVICE uint32_t shfl(uint32_t v, int lane) { return __shfl(v, lane); }
MOE_DEVICE uint32_t shfl_xor(uint32_t v, int lane_mask) { return __shfl_xor(v, lane_mask); }
MOE_DEVICE uint32_t shfl_up(uint32_t v, int delta) { return __shfl_up(v, delta); }
MOE_DEVICE LaneMask ballot(bool vote) { return __ballot(vote); }
MOE_DEVICE int popcount(LaneMask mask) { return __popcll(mask); }
MOE_DEVICE void wave_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}
#else
constexpr int kMaxWarpSize = 32;
using LaneMask = uint32_t;
MOE_DEVICE uint32_t shfl(uint32_t v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
MOE_DEVICE uint32_t shfl_xor(uint32_t v, int lane_mask) { return __shfl_xor_sync(0xffffffffu, v, lane_mask); }
MOE_DEVICE uint32_t shfl_up(uint32_t v, int delta) { return __shfl_up_sync(0xffffffffu, v, delta); }
MOE_DEVICE LaneMask ballot(bool vote) { return __ballot_sync(0xffffffffu, vote); }
MOE_DEVICE int popcount(LaneMask mask) { return __popc(mask); }
MOE_DEVICE void wave_barrier() { __syncwarp(); }
#endif
MOE_DEVICE int shfl_xor(int v, int lane_mask) { return int(shfl_xor(uint32_t(v), lane_mask)); }
MOE_DEVICE float shfl_xor(float v, int lane_mask) { return as_float(shfl_xor(as_bits(v), lane_mask)); }

MOE_DEVICE uint32_t wave_max(uint32_t v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, v);
#else
  for (int mask = kWarpSize / 2; mask > 0; mask >>= 1) {
    const uint32_t received = shfl_xor(v, mask);
    v = v > received ? v : received;
  }
  return v;
#endif
}

MOE_DEVICE int wave_sum(int v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_add_sync(0xffffffffu, v);
#else
  for (int mask = kWarpSize / 2; mask > 0; mask >>= 1) v += shfl_xor(v, mask);
  return v;
#endif
}

MOE_DEVICE float wave_sum(float v) {
#pragma unroll
  for (int mask = kWarpSize / 2; mask > 0; mask >>= 1) v += shfl_xor(v, mask);
  return v;
}

}  // namespace moe_fp8
