// The part of HIP that the kernels use, so that clang compiles their device code for AMD GPUs without ROCm. Device
// functions are clang builtins. Host functions are only declared.
#pragma once
#include <cstddef>
#include <cstdint>

#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define HIP_DYNAMIC_SHARED(type, name) extern __shared__ type name[];
#define STUB_DEVICE __device__ inline __attribute__((always_inline))

// clang reads CUDA's launch_bounds attribute only for NVIDIA. The second argument is waves per SIMD here.
#define STUB_BOUNDS_1(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define STUB_BOUNDS_2(threads, waves) STUB_BOUNDS_1(threads) __attribute__((amdgpu_waves_per_eu(waves)))
#define STUB_PICK(_1, _2, name, ...) name
#define __launch_bounds__(...) STUB_PICK(__VA_ARGS__, STUB_BOUNDS_2, STUB_BOUNDS_1, )(__VA_ARGS__)

// ---- indices ----------------------------------------------------------------------------------------------------
#define STUB_INDEX(name, X, Y, Z)                                            \
  struct name##_t {                                                          \
    struct { __device__ operator unsigned() const { return X; } } x;         \
    struct { __device__ operator unsigned() const { return Y; } } y;         \
    struct { __device__ operator unsigned() const { return Z; } } z;         \
  };                                                                         \
  extern __device__ const __attribute__((weak)) name##_t name;
#define STUB_INDEX_OF(name, builtin) STUB_INDEX(name, builtin##_x(), builtin##_y(), builtin##_z())
STUB_INDEX_OF(threadIdx, __builtin_amdgcn_workitem_id)
STUB_INDEX_OF(blockIdx, __builtin_amdgcn_workgroup_id)
STUB_INDEX_OF(blockDim, __builtin_amdgcn_workgroup_size)
STUB_INDEX(gridDim, __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x(),
           __builtin_amdgcn_grid_size_y() / __builtin_amdgcn_workgroup_size_y(),
           __builtin_amdgcn_grid_size_z() / __builtin_amdgcn_workgroup_size_z())
STUB_DEVICE unsigned __lane_id() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)); }

// ---- vectors ----------------------------------------------------------------------------------------------------
#define STUB_VECTOR(T, name)                                                                            \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                                    \
  struct alignas(4 * sizeof(T)) name##4 { T x, y, z, w; };                                              \
  __host__ STUB_DEVICE name##2 make_##name##2(T x, T y) { return {x, y}; }                              \
  __host__ STUB_DEVICE name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
STUB_VECTOR(int, int)
STUB_VECTOR(unsigned, uint)
STUB_VECTOR(float, float)

// ---- barriers and wave operations ----------------------------------------------------------------------------------
STUB_DEVICE void __threadfence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
STUB_DEVICE void __threadfence_block() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup"); }
STUB_DEVICE void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
STUB_DEVICE uint64_t __ballot(int p) { return __builtin_amdgcn_ballot_w64(p != 0); }
STUB_DEVICE int __any(int p) { return __ballot(p) != 0; }
STUB_DEVICE int __all(int p) { return __ballot(!p) == 0; }
// ROCm's reduction over a block is a library function. Here it costs three barriers too.
STUB_DEVICE int __syncthreads_count(int p) {
  __shared__ int votes;
  if (threadIdx.x + threadIdx.y + threadIdx.z == 0) votes = 0;
  __syncthreads();
  if (p) __hip_atomic_fetch_add(&votes, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  __syncthreads();
  const int count = votes;
  __syncthreads();
  return count;
}
STUB_DEVICE int __syncthreads_or(int p) { return __syncthreads_count(p != 0) != 0; }
STUB_DEVICE int __syncthreads_and(int p) { return __syncthreads_count(p == 0) == 0; }

constexpr int warpSize = 64;  // on every architecture that is checked
template <class T>
STUB_DEVICE T stub_from_lane(T v, unsigned source) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  struct Words { int word[sizeof(T) / 4]; } words = __builtin_bit_cast(Words, v);
  for (int& word : words.word) word = __builtin_amdgcn_ds_bpermute(int(source << 2), word);
  return __builtin_bit_cast(T, words);
}
template <class T>
STUB_DEVICE T __shfl(T v, int source, int width = warpSize) {
  return stub_from_lane(v, (__lane_id() & ~unsigned(width - 1)) | (unsigned(source) & unsigned(width - 1)));
}
template <class T>
STUB_DEVICE T __shfl_xor(T v, int mask, int width = warpSize) {
  const unsigned lane = __lane_id(), source = lane ^ unsigned(mask);
  return stub_from_lane(v, source <= (lane | unsigned(width - 1)) ? source : lane);
}
template <class T>
STUB_DEVICE T __shfl_up(T v, unsigned delta, int width = warpSize) {
  const unsigned lane = __lane_id();
  return stub_from_lane(v, (lane & unsigned(width - 1)) >= delta ? lane - delta : lane);
}
template <class T>
STUB_DEVICE T __shfl_down(T v, unsigned delta, int width = warpSize) {
  const unsigned lane = __lane_id();
  return stub_from_lane(v, (lane & unsigned(width - 1)) + delta < unsigned(width) ? lane + delta : lane);
}

// ---- atomics ----------------------------------------------------------------------------------------------------
template <class T>
struct StubSame {
  using type = T;
};
#define STUB_ATOMIC(cuda_name, hip_name)                                            \
  template <class T>                                                                \
  STUB_DEVICE T cuda_name(T* p, typename StubSame<T>::type v) {                     \
    return hip_name(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);              \
  }
STUB_ATOMIC(atomicAdd, __hip_atomic_fetch_add)
STUB_ATOMIC(atomicMax, __hip_atomic_fetch_max)
STUB_ATOMIC(atomicMin, __hip_atomic_fetch_min)
STUB_ATOMIC(atomicOr, __hip_atomic_fetch_or)
STUB_ATOMIC(atomicAnd, __hip_atomic_fetch_and)
STUB_ATOMIC(atomicExch, __hip_atomic_exchange)
template <class T>
STUB_DEVICE T atomicCAS(T* p, typename StubSame<T>::type expected, typename StubSame<T>::type v) {
  __hip_atomic_compare_exchange_strong(p, &expected, v, __ATOMIC_RELAXED, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  return expected;
}

// ---- arithmetic -------------------------------------------------------------------------------------------------
STUB_DEVICE float __uint_as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
STUB_DEVICE uint32_t __float_as_uint(float f) { return __builtin_bit_cast(uint32_t, f); }
STUB_DEVICE float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
STUB_DEVICE float fminf(float a, float b) { return __builtin_fminf(a, b); }
STUB_DEVICE float fabsf(float a) { return __builtin_fabsf(a); }
STUB_DEVICE float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
STUB_DEVICE float sqrtf(float a) { return __builtin_sqrtf(a); }
STUB_DEVICE int __popc(unsigned v) { return __builtin_popcount(v); }
STUB_DEVICE int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
STUB_DEVICE int __ffs(int v) { return __builtin_ffs(v); }
STUB_DEVICE int __ffsll(long long v) { return __builtin_ffsll(v); }
STUB_DEVICE int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
STUB_DEVICE void* memcpy(void* to, const void* from, size_t bytes) { return __builtin_memcpy(to, from, bytes); }
template <class T>
STUB_DEVICE T __ldg(const T* p) {
  return *p;
}
template <class T>
STUB_DEVICE constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
STUB_DEVICE constexpr T max(T a, T b) {
  return a < b ? b : a;
}

// ---- host -------------------------------------------------------------------------------------------------------
struct dim3 {
  unsigned x, y, z;
  __host__ __device__ constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
typedef struct ihipStream_t* hipStream_t;
enum hipError_t { hipSuccess = 0, hipErrorInvalidValue = 1 };
enum hipDeviceAttribute_t {
  hipDeviceAttributeMultiprocessorCount,
  hipDeviceAttributeMaxSharedMemoryPerBlock,
  hipDeviceAttributeSharedMemPerBlockOptin,
  hipDeviceAttributeL2CacheSize,
  hipDeviceAttributeWarpSize,
};
struct hipDeviceProp_t {
  char gcnArchName[256];
};
enum hipFuncAttribute { hipFuncAttributeMaxDynamicSharedMemorySize };
hipError_t hipGetLastError();
hipError_t hipPeekAtLastError();
const char* hipGetErrorString(hipError_t);
hipError_t hipGetDevice(int*);
hipError_t hipGetDeviceProperties(hipDeviceProp_t*, int);
hipError_t hipDeviceGetAttribute(int*, hipDeviceAttribute_t, int);
hipError_t hipMemsetAsync(void*, int, size_t, hipStream_t = nullptr);
extern "C" hipError_t hipFuncSetAttribute(const void*, hipFuncAttribute, int);
extern "C" hipError_t hipLaunchKernel(const void*, dim3, dim3, void**, size_t, hipStream_t);
template <class Kernel>
hipError_t hipOccupancyMaxActiveBlocksPerMultiprocessor(int*, Kernel, int, size_t) {
  return hipSuccess;
}

// A kernel<<<...>>>() expression compiles to this call.
extern "C" hipError_t __hipPushCallConfiguration(dim3, dim3, size_t = 0, hipStream_t = nullptr);
extern "C" hipError_t __hipPopCallConfiguration(dim3*, dim3*, size_t*, hipStream_t*);
#define STUB_PLAIN(...) __VA_ARGS__
#define STUB_LAUNCH(...) __VA_ARGS__
#define hipLaunchKernelGGL(kernel, grid, block, shared, stream, ...) \
  STUB_LAUNCH(STUB_PLAIN kernel)<<<grid, block, shared, stream>>>(__VA_ARGS__)
