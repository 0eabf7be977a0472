// Vendors, and what their compilers call things. Everything beside platform/ is written against the names in here
// and compiles as CUDA, as HIP (after hipify), as plain host C++, and as hipified code under the tests' SIMT emulation
// (MOE_SIMT).
#pragma once
#if defined(__HIP__)
#include <hip/hip_runtime.h>
#define MOE_HIP 1
#elif defined(__CUDACC__)
#include <cuda_runtime.h>
#define MOE_CUDA 1
#endif

#if defined(MOE_CUDA) || defined(MOE_HIP)
#define MOE_HD __host__ __device__ __forceinline__
#define MOE_DEVICE __device__ __forceinline__
#define MOE_GLOBAL static __global__
#else
#define MOE_HD inline
#endif

// Threads that a multiprocessor holds, more on data centers' chips.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100))
constexpr int kMultiprocessorThreads = 2048;
#else
constexpr int kMultiprocessorThreads = 1536;
#endif

// The second argument of launch bounds means blocks per multiprocessor on CUDA, no more than fit, and waves per SIMD on
// HIP.
#if defined(MOE_CUDA)
constexpr int fitting_blocks(int threads, int blocks) {
  return threads * blocks > kMultiprocessorThreads ? kMultiprocessorThreads / threads : blocks;
}
#define MOE_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, fitting_blocks(threads, blocks))
#elif defined(MOE_HIP)
#define MOE_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads)
#endif

#if defined(MOE_CUDA)
#define MOE_GRID_CONSTANT __grid_constant__
#else
#define MOE_GRID_CONSTANT
#endif

#if defined(MOE_SIMT)
#define MOE_DYNAMIC_SMEM(name) HIP_DYNAMIC_SHARED(unsigned char, name)
#else
#define MOE_DYNAMIC_SMEM(name) extern __shared__ __align__(128) unsigned char name[]
#endif

// A loop of the CPU that is there twice: for CPUs that have fmaf as an instruction, and for those that call the library
// for it. The same bytes; which of them runs is found out when the module is loaded. What it calls becomes part of it,
// for that is compiled once.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define MOE_FUSED __attribute__((flatten, target_clones("arch=haswell", "default")))
#else
#define MOE_FUSED
#endif
