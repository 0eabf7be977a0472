// One set of names for what the vendors' compilers call differently. All code outside of platform/ uses these names. It
// compiles as CUDA, as HIP (after hipify), as plain host C++, and as hipified code under the tests' SIMT emulation
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

// The architecture whose machine code is compiled, as CUDA counts them; 0 on the host and on AMD's chips.
#if defined(__CUDA_ARCH__)
constexpr int kCudaArch = __CUDA_ARCH__;
#else
constexpr int kCudaArch = 0;
#endif

// Threads that a multiprocessor holds: 2048 on data center GPUs, 1536 on others.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100))
constexpr int kMultiprocessorThreads = 2048;
#else
constexpr int kMultiprocessorThreads = 1536;
#endif

// CUDA reads the second argument of __launch_bounds__ as blocks per multiprocessor, HIP as waves per SIMD. So only CUDA
// gets it, and no more blocks than a multiprocessor holds.
#if defined(MOE_CUDA)
constexpr int resident_blocks_bound(int threads, int blocks) {
  return threads * blocks > kMultiprocessorThreads ? kMultiprocessorThreads / threads : blocks;
}
#define MOE_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, resident_blocks_bound(threads, blocks))
#define MOE_GRID_CONSTANT __grid_constant__
#else
#define MOE_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads)
#define MOE_GRID_CONSTANT
#endif

#if defined(MOE_SIMT)
#define MOE_DYNAMIC_SMEM(name) HIP_DYNAMIC_SHARED(unsigned char, name)
#else
#define MOE_DYNAMIC_SMEM(name) extern __shared__ __align__(128) unsigned char name[]
#endif

// Compiles a CPU loop twice: for CPUs with an fmaf instruction, and for CPUs that call the library for it. Both give
// the same bytes, and the loader picks one. Functions that the loop calls are inlined (flatten), because they are not
// cloned.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define MOE_FMA_CLONES __attribute__((flatten, target_clones("arch=haswell", "default")))
#else
#define MOE_FMA_CLONES
#endif
