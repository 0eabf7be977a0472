// HIP for the CPU: g++ compiles hipified kernels unchanged against this header and runs them on the emulator beside it.
//
//   g++ -std=c++17 -DMOE_SIMT -DSIMT_WARP=64 -DUSE_ROCM -D__HIP__ -D__gfx942__ -D__GFX9__ -I simt -x c++ kernel.hip
//
// The architecture macros choose the fp8 formats, and SIMT_WARP chooses the wave size. Launches are synchronous:
// simt::launch(grid, block, shared_bytes, function) and hipLaunchKernelGGL. A failed launch returns
// hipErrorLaunchFailure, and hipGetErrorString then tells the fault and its thread.
// Environment: SIMT_THREADS (OS threads of a launch), SIMT_TIMEOUT (seconds that one of them may compute),
// SIMT_MULTIPROCESSORS (default 2).
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "../fp8.h"
#include "../launch.h"
#include "../matrix.h"

#define __host__
#define __device__
#define __global__
#define __constant__
#define __shared__ static thread_local
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define HIP_DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(simt::current->dynamic_shared());

// ---- indices ----------------------------------------------------------------------------------------------------
#define threadIdx (simt::current->thread_index())
#define blockIdx (simt::current->block_index())
#define blockDim (simt::current->block_size())
#define gridDim (simt::current->grid_size())
#define warpSize int(simt::kWave)
inline unsigned __lane_id() { return simt::current->lane(); }

// ---- vectors ----------------------------------------------------------------------------------------------------
#define SIMT_VECTOR(T, name)                                                                          \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                                  \
  struct alignas(4 * sizeof(T)) name##4 { T x, y, z, w; };                                            \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                          \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SIMT_VECTOR(int, int)
SIMT_VECTOR(unsigned, uint)
SIMT_VECTOR(float, float)
#undef SIMT_VECTOR

// ---- barriers and wave operations: each names the line that wrote it -----------------------------------------------
inline void __syncthreads(simt::Site at = simt::Site::here("__syncthreads")) { simt::current->barrier(at); }
inline void __syncwarp(simt::Site at = simt::Site::here("__syncwarp")) { simt::current->wave_barrier(at); }
inline void __builtin_amdgcn_wave_barrier(simt::Site at = simt::Site::here("wave_barrier")) {
  simt::current->wave_barrier(at);
}
inline int __syncthreads_count(int p, simt::Site at = simt::Site::here("__syncthreads_count")) {
  return int(simt::current->barrier_count(p != 0, at));
}
inline int __syncthreads_or(int p, simt::Site at = simt::Site::here("__syncthreads_or")) {
  return simt::current->barrier_count(p != 0, at) != 0;
}
inline int __syncthreads_and(int p, simt::Site at = simt::Site::here("__syncthreads_and")) {
  return simt::current->barrier_count(p == 0, at) == 0;
}
inline uint64_t __ballot(int p, simt::Site at = simt::Site::here("__ballot")) { return simt::current->ballot(p, at); }
inline int __any(int p, simt::Site at = simt::Site::here("__any")) { return simt::current->ballot(p, at) != 0; }
inline int __all(int p, simt::Site at = simt::Site::here("__all")) { return simt::current->ballot(!p, at) == 0; }

// If the source is outside the segment of `width` lanes, a lane reads itself.
template <class T>
T __shfl(T v, int source, int width = warpSize, simt::Site at = simt::Site::here("__shfl")) {
  const unsigned lane = __lane_id(), segment = lane & ~unsigned(width - 1);
  return simt::current->exchange(v, segment | (unsigned(source) & unsigned(width - 1)), at);
}
template <class T>
T __shfl_xor(T v, int mask, int width = warpSize, simt::Site at = simt::Site::here("__shfl_xor")) {
  const unsigned lane = __lane_id(), source = lane ^ unsigned(mask), end = (lane | unsigned(width - 1)) + 1;
  return simt::current->exchange(v, source < end ? source : lane, at);
}
template <class T>
T __shfl_up(T v, unsigned delta, int width = warpSize, simt::Site at = simt::Site::here("__shfl_up")) {
  const unsigned lane = __lane_id(), place = lane & unsigned(width - 1);
  return simt::current->exchange(v, place >= delta ? lane - delta : lane, at);
}
template <class T>
T __shfl_down(T v, unsigned delta, int width = warpSize, simt::Site at = simt::Site::here("__shfl_down")) {
  const unsigned lane = __lane_id(), place = lane & unsigned(width - 1);
  return simt::current->exchange(v, place + delta < unsigned(width) ? lane + delta : lane, at);
}

// ---- atomics, all of them sequentially consistent ------------------------------------------------------------------
#define __HIP_MEMORY_SCOPE_SINGLETHREAD 1
#define __HIP_MEMORY_SCOPE_WAVEFRONT 2
#define __HIP_MEMORY_SCOPE_WORKGROUP 3
#define __HIP_MEMORY_SCOPE_AGENT 4
#define __HIP_MEMORY_SCOPE_SYSTEM 5

namespace simt {
template <class T>
struct Same {
  using type = T;
};
template <class T>
using same_t = typename Same<T>::type;  // takes no part in the deduction of T

template <class T, class F>
T atomic_update(T* p, F next_of) {
  T old, next;
  __atomic_load(p, &old, __ATOMIC_SEQ_CST);
  do next = next_of(old);
  while (!__atomic_compare_exchange(p, &old, &next, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
  return old;
}
}  // namespace simt

#define SIMT_ATOMIC(cuda_name, hip_name, expression)                        \
  template <class T>                                                        \
  T cuda_name(T* p, simt::same_t<T> v) {                                    \
    return simt::atomic_update(p, [v](T old) -> T { return expression; }); \
  }                                                                         \
  template <class T>                                                        \
  T hip_name(T* p, simt::same_t<T> v, int, int) {                           \
    return cuda_name(p, v);                                                 \
  }
SIMT_ATOMIC(atomicAdd, __hip_atomic_fetch_add, old + v)
SIMT_ATOMIC(atomicMax, __hip_atomic_fetch_max, old < v ? v : old)
SIMT_ATOMIC(atomicMin, __hip_atomic_fetch_min, v < old ? v : old)
SIMT_ATOMIC(atomicOr, __hip_atomic_fetch_or, old | v)
SIMT_ATOMIC(atomicAnd, __hip_atomic_fetch_and, old & v)
SIMT_ATOMIC(atomicExch, __hip_atomic_exchange, v)
#undef SIMT_ATOMIC
template <class T>
T atomicCAS(T* p, simt::same_t<T> expected, simt::same_t<T> v) {
  return simt::atomic_update(p, [=](T old) { return old == expected ? v : old; });
}

// An atomic load may be part of a spin loop, so others get a turn. A spin on a volatile load would starve its own
// block.
template <class T>
std::remove_cv_t<T> __hip_atomic_load(T* p, int, int) {
  simt::current->relax();
  std::remove_cv_t<T> v;
  __atomic_load(p, &v, __ATOMIC_SEQ_CST);
  return v;
}
template <class T>
void __hip_atomic_store(T* p, simt::same_t<T> v, int, int) {
  __atomic_store(p, &v, __ATOMIC_SEQ_CST);
}
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_block() { __threadfence(); }
inline void __builtin_amdgcn_fence(int, const char*) { __threadfence(); }
inline void __builtin_amdgcn_s_sleep(int) {
  simt::current->relax();
  simt::yield();
}

// ---- instructions --------------------------------------------------------------------------------------------------
inline float __builtin_amdgcn_fmed3f(float a, float b, float c) {
  return std::fmax(std::fmin(std::fmax(a, b), c), std::fmin(a, b));
}
inline int __builtin_amdgcn_cvt_pk_fp8_f32(float a, float b, int old, bool upper) {
  return simt::pack_half(simt::e4m3_from_float(a), simt::e4m3_from_float(b), old, upper);
}
inline int __builtin_amdgcn_cvt_pk_bf8_f32(float a, float b, int old, bool upper) {
  return simt::pack_half(simt::e5m2_from_float(a), simt::e5m2_from_float(b), old, upper);
}
#define SIMT_MFMA(name, held_a, held_b)                                                                           \
  template <class Operand, class Sums>                                                                            \
  Sums name(Operand a, Operand b, Sums sums, int, int, int, simt::Site at = simt::Site::here("mfma")) {             \
    static_assert(sizeof(Operand) == 8 && sizeof(Sums) == 16, "a lane has 8 bytes and 4 sums");                     \
    float d[4];                                                                                                   \
    memcpy(d, &sums, sizeof d);                                                                                   \
    const simt::ElementAccess a_is(simt::Held::held_a), b_is(simt::Held::held_b);                                        \
    simt::mfma_16x16(d, a_is, __builtin_bit_cast(uint64_t, a), b_is, __builtin_bit_cast(uint64_t, b), at);            \
    memcpy(&sums, d, sizeof d);                                                                                   \
    return sums;                                                                                                  \
  }
SIMT_MFMA(__builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8, kE4M3, kE4M3)
SIMT_MFMA(__builtin_amdgcn_mfma_f32_16x16x32_fp8_bf8, kE4M3, kE5M2)
SIMT_MFMA(__builtin_amdgcn_mfma_f32_16x16x16f16, kHalf, kHalf)
#undef SIMT_MFMA
template <class Operand, class Sums>
Sums __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(Operand a, Operand b, Sums sums, int type_a, int type_b,
                                                      int byte_a, unsigned scales_a, int byte_b, unsigned scales_b,
                                                      simt::Site at = simt::Site::here("mfma")) {
  static_assert(sizeof(Operand) == 32 && sizeof(Sums) == 16, "a lane has 32 bytes and 4 sums");
  float d[4];
  uint64_t of_a[4], of_b[4];
  memcpy(d, &sums, sizeof d);
  memcpy(of_a, &a, sizeof of_a);
  memcpy(of_b, &b, sizeof of_b);
  const simt::ElementAccess a_is{simt::Held(type_a)}, b_is{simt::Held(type_b)};
  const unsigned scale_a = scales_a >> (8 * byte_a) & 0xff, scale_b = scales_b >> (8 * byte_b) & 0xff;
  simt::mfma_scale_16x16x128(d, a_is, of_a, scale_a, b_is, of_b, scale_b, at);
  memcpy(&sums, d, sizeof d);
  return sums;
}
#if !defined(__clang__)
template <class T>
std::remove_cv_t<T> __builtin_nontemporal_load(T* p) {
  return *p;
}
template <class V, class T>
void __builtin_nontemporal_store(V v, T* p) {
  *p = v;
}
#endif
template <class T>
T __ldg(const T* p) {
  return *p;
}
inline uint32_t __float_as_uint(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}

#include "../host_api.h"
#if defined(SIMT_HOPPER)
#include "../hopper.h"
#endif
